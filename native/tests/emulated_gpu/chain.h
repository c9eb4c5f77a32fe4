// Memory as a kernel sees it that starts while those before it still run (programmatic dependent launch). Kernels run one after another here:
// the thread blocks that are chosen for it find the bytes that were there before the chain, until all of their threads wait for the others.
// A kernel that reads too early computes with stale bytes then, as it may on a GPU, and one that writes too early stops the program. With
// EMULATED_EARLY=1 kernels that read such bytes are named, also those that read them again later.
//
// A chain is what was launched to start early on a device since the last copy, memset, synchronization or other launch. Events do not end it:
// in a recorded step kernels start early across streams too.
#pragma once

#include <cstddef>

namespace emulated {

size_t page_bytes();

// Whole pages of a device, which kernels may write.
void add_pages(char* begin, size_t bytes, int device);
void remove_pages(char* begin);

// From now on writes to this device's memory are noted, until the chain ends.
void continue_chain(int device);
// Every kernel of the chain has ended.
void end_chain();
void end_chain_of_others(int device);

// Memory that the chain has written shows what it held before, and nobody may write to it.
void show_old();
// It shows what it holds now.
void show_present();

}  // namespace emulated
