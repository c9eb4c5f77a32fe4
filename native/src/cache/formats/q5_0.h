// q5_0: ggml's blocks of 32, one f16 scale each.   value = (code − 16) · scale, code 0 … 31
//
//   byte 22·k + 0 … 1      scale of block k, negative when the largest magnitude is positive
//   byte 22·k + 2 … 5      fifth bits of channels 32·k … 32·k + 31 (stock_blocks.h)
//   byte 22·k + 6 … 21     their other bits
#pragma once

#include "cache/formats/stock_blocks.h"

namespace lkv {

using Q5_0 = StockBlocks<5, false>;
static_assert(Q5_0::block_bytes == 22, "ggml's block_q5_0");

}  // namespace lkv
