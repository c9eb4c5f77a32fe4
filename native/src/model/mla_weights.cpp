#include "model/mla_weights.h"

namespace lkv {

MlaWeights load_mla(const FileTensors& tensors, const MlaSizes& sizes, int n_embd, int n_head, int rank,
                    const std::string& blk) {
    MlaWeights w;
    const int64_t queries = n_head * sizes.query();
    if (sizes.q_rank > 0 && tensors.find(blk + "attn_q.weight") == nullptr) {
        w.q_a = tensors.need(blk + "attn_q_a.weight", {n_embd, sizes.q_rank});
        w.q_a_norm = tensors.need(blk + "attn_q_a_norm.weight", {sizes.q_rank});
        w.q_b = tensors.need(blk + "attn_q_b.weight", {sizes.q_rank, queries});
    } else {
        w.q = tensors.need(blk + "attn_q.weight", {n_embd, queries});
    }
    w.kv_a = tensors.need(blk + "attn_kv_a_mqa.weight", {n_embd, sizes.row()});
    w.kv_a_norm = tensors.need(blk + "attn_kv_a_norm.weight", {sizes.kv_rank});
    w.k_b = tensors.need(blk + "attn_k_b.weight", {sizes.n_key, rank, n_head});
    w.v_b = tensors.need(blk + "attn_v_b.weight", {rank, sizes.n_value, n_head});
    return w;
}

}  // namespace lkv
