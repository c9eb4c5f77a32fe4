// Keys and tensors of a GGUF as the converter copies them: values with their types, strings and tensors as bytes.
#include "gguf/reader.h"

#include <pybind11/numpy.h>

#include <memory>

#include "bindings.h"
#include "gil.h"

namespace py = pybind11;
using lkv::GgufFile;
using lkv::GgufType;
using lkv::GgufValue;

namespace {

py::object stored(const GgufValue& value, size_t i) {
    return value.type == GgufType::string ? py::bytes(value.strings[i]) : gguf_number(value, i);
}

// key -> (type, type of the items or None, value)
py::dict values(const GgufFile& file) {
    py::dict out;
    for (const GgufValue& value : file.values()) {
        const auto type = static_cast<uint32_t>(value.type);
        if (!value.is_array) {
            out[text(value.key)] = py::make_tuple(type, py::none(), stored(value, 0));
            continue;
        }
        py::list items(value.count);
        for (size_t i = 0; i < value.count; i++) items[i] = stored(value, i);
        out[text(value.key)] = py::make_tuple(static_cast<uint32_t>(GgufType::array), type, items);
    }
    return out;
}

// (name, shape, type, bytes) of each
py::list tensors(const GgufFile& file) {
    py::list out;
    for (const lkv::TensorInfo& tensor : file.tensors()) {
        py::tuple shape(tensor.n_dims);
        for (int i = 0; i < tensor.n_dims; i++) shape[i] = tensor.ne[tensor.n_dims - 1 - i];
        const py::object type = text(ggml_type_name(tensor.type)).attr("lower")();
        out.append(py::make_tuple(text(tensor.name), shape, type, tensor.bytes));
    }
    return out;
}

// [rows, bytes of a row], read-only, in the file
py::array raw(const py::object& self, const std::string& name) {
    const lkv::TensorInfo& tensor = self.cast<const GgufFile&>().tensor(name);
    const auto row = static_cast<py::ssize_t>(ggml_row_size(tensor.type, tensor.ne[0]));
    const py::array_t<uint8_t> view({static_cast<py::ssize_t>(tensor.bytes) / row, row}, tensor.data, self);
    view.attr("setflags")(py::arg("write") = false);
    return view;
}

}  // namespace

py::object gguf_number(const GgufValue& value, size_t i) {
    if (value.type == GgufType::boolean) return py::bool_(value.boolean(i));
    if (value.is_float()) return py::float_(value.number(i));
    const uint64_t bits = value.integer_bits(i);
    return value.is_negative(i) ? py::object(py::int_(static_cast<int64_t>(bits))) : py::object(py::int_(bits));
}

void bind_gguf(py::module_& module) {
    py::class_<GgufFile, std::unique_ptr<GgufFile>>(module, "GgufFile")
        .def(py::init([](const std::string& path) {
                 const Unlocked unlocked;
                 return std::make_unique<GgufFile>(GgufFile::open(path));
             }),
             py::arg("path"))
        .def("values", &values)
        .def("tensors", &tensors)
        .def("raw", &raw, py::arg("name"));
}
