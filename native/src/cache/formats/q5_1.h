// q5_1: ggml's blocks of 32, one f16 scale and one f16 minimum each.   value = code · scale + minimum, code 0 … 31
//
//   byte 24·k + 0 … 1      scale of block k
//   byte 24·k + 2 … 3      minimum
//   byte 24·k + 4 … 7      fifth bits of channels 32·k … 32·k + 31 (stock_blocks.h)
//   byte 24·k + 8 … 23     their other bits
#pragma once

#include "cache/formats/stock_blocks.h"

namespace lkv {

using Q5_1 = StockBlocks<5, true>;
static_assert(Q5_1::block_bytes == 24, "ggml's block_q5_1");

}  // namespace lkv
