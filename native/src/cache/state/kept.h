// A state's last section, under eviction: what each layer has kept of the middle, and the masses of recent tokens.
//
//   u32 n · per sequence i32 sequence, i32 tokens that came one by one
//   per layer that evicts: layouts of K and V · u32 n_used · per used slot i32 slot · i32 pos · u64 seq · f32 mass, its rows
//   u32 n · per token of recent i32 pos · u64 seq, f32 mass in each of these layers
#pragma once

#include "cache/placement/placement.h"
#include "cache/rows/rows.h"
#include "cache/state/bytes.h"
#include "cache/state/saved_state.h"

namespace lkv {

// Slots between those of a sequence that are copied from a device with them, rather than in many short copies.
constexpr int most_read_between = 16;

// A slot's K and V. rows: the region's storage.
void put_rows(const LayerRows& layer, const uint8_t* rows, int slot, ByteWriter& out);

// Nothing where every token stays.
void put_kept(const KvCacheOptions& options, const Placement& placement, const Rows& rows, uint64_t mask,
              ByteWriter& out);

// After the regions. to_seq: the sequence that tokens go to, in slots that are free; -1: to their own, in their own. Returns whether rows
// are coded anew. Errors: Error.
bool get_kept(ByteReader& in, int to_seq, Accept accept, Placement& placement, const Rows& rows);

}  // namespace lkv
