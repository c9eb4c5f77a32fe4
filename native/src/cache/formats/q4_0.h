// q4_0: ggml's blocks of 32, one f16 scale each.   value = (code − 8) · scale, code 0 … 15
//
//   byte 18·k + 0 … 1      scale of block k, negative when the largest magnitude is positive
//   byte 18·k + 2 … 17     codes of channels 32·k … 32·k + 31 (stock_blocks.h)
#pragma once

#include "cache/formats/stock_blocks.h"

namespace lkv {

using Q4_0 = StockBlocks<4, false>;
static_assert(Q4_0::block_bytes == 18, "ggml's block_q4_0");

}  // namespace lkv
