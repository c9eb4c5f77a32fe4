#include "model/sidecar.h"

#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gguf/content_hash.h"
#include "gguf_schema.h"

namespace lkv {
namespace {

constexpr std::string_view flag = "--latent";
constexpr size_t shown_digits = 12;

std::string base_name(const GgufFile& sidecar) {
    return quoted(sidecar.find_string(key::base_name).value_or("the model it was made of"));
}

// Some rows of a matrix, or values of a vector, under a name of their own.
TensorInfo rows_of(const TensorInfo& packed, std::string name, int64_t first, int64_t n_rows) {
    TensorInfo rows = packed;
    const size_t row_bytes =
        packed.n_dims == 1 ? ggml_type_size(packed.type) : ggml_row_size(packed.type, packed.ne[0]);
    rows.name = std::move(name);
    rows.ne[packed.n_dims == 1 ? 0 : 1] = n_rows;
    rows.data += static_cast<size_t>(first) * row_bytes;
    rows.offset += static_cast<uint64_t>(first) * row_bytes;
    rows.bytes = static_cast<size_t>(n_rows) * row_bytes;
    return rows;
}

// Q, K and V of a layer apart, of q, w and w rows, where the file has no such tensors already.
void take_apart(const GgufFile& file, const std::string& blk, int64_t q, int64_t w, std::vector<TensorInfo>& tensors) {
    for (const std::string leaf : {".weight", ".bias"}) {
        const TensorInfo* const packed = file.find_tensor(blk + "attn_qkv" + leaf);
        if (packed == nullptr) {
            continue;
        }
        if (packed->ne[leaf == ".bias" ? 0 : 1] != q + 2 * w || packed->n_dims != (leaf == ".bias" ? 1 : 2) ||
            (leaf == ".bias" && ggml_blck_size(packed->type) != 1)) {
            fail("gguf", "expected ", packed->name, " of ", q + 2 * w, " rows; got ", packed->ne[1]);
        }
        for (const auto& [side, first, n_rows] : {std::tuple("q", int64_t{0}, q), {"k", q, w}, {"v", q + w, w}}) {
            std::string name = blk + "attn_" + side + leaf;
            if (file.find_tensor(name) == nullptr) {
                tensors.push_back(rows_of(*packed, std::move(name), first, n_rows));
            }
        }
    }
}

}  // namespace

GgufFile open_model_file(const std::string& path, const std::string& latent_path, bool use_mmap) {
    GgufFile base = GgufFile::open(path, use_mmap);
    if (latent_path.empty()) {
        if (base.has(key::base_hash)) {
            fail(flag, "expected ", base_name(base), " as the model, with --latent (latent_path) ", quoted_path(path),
                 "; got this sidecar alone");
        }
        return base;
    }
    GgufFile sidecar = GgufFile::open(latent_path, use_mmap);
    const auto expected = sidecar.find_string(key::base_hash);
    if (!expected) {
        fail(flag, "expected a sidecar, as convert --sidecar writes it; got ", quoted_path(latent_path),
             ", which is none: open it as the model");
    }
    if (base.has(key::base_hash) || base.has(key::k_path)) {
        fail(flag, "expected ", base_name(sidecar), " as the model of ", quoted_path(latent_path), "; got ",
             quoted_path(path), base.has(key::base_hash) ? ", a sidecar too" : ", which has a latent cache of its own");
    }
    const std::string found = content_hash(base);
    if (found != *expected) {
        fail(flag, "expected ", base_name(sidecar), " (hash ", quoted(expected->substr(0, shown_digits)),
             ") as the model of ", quoted_path(latent_path), "; got ", quoted_path(path), " (",
             quoted(found.substr(0, shown_digits)), ")");
    }
    base.join(std::move(sidecar), "latentkv.");
    return base;
}

void fit_base_tensors(GgufFile& file, const HParams& hparams, const CacheSpec& spec) {
    std::vector<TensorInfo> apart;
    std::set<std::string> gone;
    for (size_t il = 0; il < spec.layers.size(); il++) {
        const LayerCacheSpec& layer = spec.layers[il];
        const std::string blk = "blk." + std::to_string(il) + ".";
        if (layer.k_path == KPath::full && layer.v_path == VPath::full) {
            continue;
        }
        take_apart(file, blk, hparams.width_q(static_cast<int>(il)), hparams.heads[il].width(), apart);
        gone.insert({blk + "attn_qkv.weight", blk + "attn_qkv.bias"});
        if (layer.k_path == KPath::absorbed) {
            gone.insert(blk + "attn_k.bias");
        }
        if ((layer.k_path == KPath::rebuild || layer.k_path == KPath::absorbed) && !layer.k.encoded) {
            gone.insert(blk + "attn_k.weight");
        }
        if (layer.v_path == VPath::latent && !layer.v.encoded) {
            gone.insert(blk + "attn_v.weight");
        }
    }
    std::vector<TensorInfo> kept;
    for (const auto* list : {&file.tensors(), &std::as_const(apart)}) {
        for (const TensorInfo& tensor : *list) {
            if (tensor.joined || !gone.contains(tensor.name)) kept.push_back(tensor);
        }
    }
    file.set_tensors(std::move(kept));
}

}  // namespace lkv
