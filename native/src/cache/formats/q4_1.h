// q4_1: ggml's blocks of 32, one f16 scale and one f16 minimum each.   value = code · scale + minimum, code 0 … 15
//
//   byte 20·k + 0 … 1      scale of block k
//   byte 20·k + 2 … 3      minimum
//   byte 20·k + 4 … 19     codes of channels 32·k … 32·k + 31 (stock_blocks.h)
#pragma once

#include "cache/formats/stock_blocks.h"

namespace lkv {

using Q4_1 = StockBlocks<4, true>;
static_assert(Q4_1::block_bytes == 20, "ggml's block_q4_1");

}  // namespace lkv
