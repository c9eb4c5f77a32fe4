// A state's last section, where layers are recurrent: what its sequences go on from.
//
//   u64 bytes of a sequence's state · u32 n · per snapshot i32 sequence, i32 position after its last token, its bytes
//
// They are the sequence's own state and the copies of earlier ones. Of a sequence in parts, each part has those after its own tokens.
#pragma once

#include "cache/kv_cache.h"
#include "cache/state/bytes.h"

namespace lkv {

// Nothing where no layer is recurrent.
void put_recurrent(const SequenceState& states, uint64_t mask, const Positions& positions, ByteWriter& out);

// After all other sections. sequences: those that the state is of. to_seq: the one that takes them, -1: their own.
// Errors: Error for states of another size, sequence or order.
void get_recurrent(ByteReader& in, uint64_t sequences, int to_seq, KvCache& cache);

// Errors: Error for a sequence whose state is not that after its last token.
void check_recurrent(const KvCache& cache);

}  // namespace lkv
