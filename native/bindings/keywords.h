// Keyword arguments of Python that become the fields of a struct of options; what is not given keeps its default.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <map>
#include <string>
#include <type_traits>

class Keywords {
public:
    explicit Keywords(std::string function) : function_(std::move(function)) {}

    template <typename Place>
    void field(const char* name, Place& place) {
        fields_[name] = [&place](const pybind11::handle& value) { place = value.cast<Place>(); };
    }

    // A keyword that somebody else reads.
    void other(const char* name) {
        fields_[name] = [](const pybind11::handle&) {};
    }

    // Errors: TypeError for another keyword, or a value of another type.
    void read(const pybind11::kwargs& given) const {
        for (const auto& [key, value] : given) {
            const auto name = key.cast<std::string>();
            const auto found = fields_.find(name);
            if (found == fields_.end()) {
                throw pybind11::type_error(function_ + "() got an unexpected keyword argument '" + name + "'");
            }
            try {
                found->second(value);
            } catch (const pybind11::cast_error&) {
                const auto type = pybind11::str(pybind11::type::of(value)).cast<std::string>();
                throw pybind11::type_error(function_ + "() got a " + type + " for " + name);
            }
        }
    }

private:
    std::string function_;
    std::map<std::string, std::function<void(const pybind11::handle&)>> fields_;
};
