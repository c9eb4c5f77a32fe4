#include "model/recurrent/short_conv_weights.h"

#include "base/error.h"

namespace lkv {

ShortConvWeights load_recurrent(const FileTensors& tensors, const ShortConvSizes& sizes, int n_embd,
                                const std::string& blk) {
    ShortConvWeights w;
    w.input = tensors.need(blk + "shortconv.in_proj.weight", {n_embd, 3 * int64_t{n_embd}});
    w.conv = tensors.need(blk + "shortconv.conv.weight", {sizes.d_conv, n_embd});
    w.output = tensors.need(blk + "shortconv.out_proj.weight", {n_embd, n_embd});
    if (w.conv->type != GGML_TYPE_F32) {
        fail("gguf", "expected ", w.conv->name, " in f32; got ", ggml_type_name(w.conv->type));
    }
    return w;
}

}  // namespace lkv
