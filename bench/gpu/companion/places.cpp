#include "places.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "real.h"

namespace consumer {

namespace {

constexpr unsigned driver_version = 12050;  // which has all of these
constexpr unsigned at_once = 2;             // multiprocessors, the fewest that can be kept
constexpr unsigned most_places = 128;

template <class F>
F driver(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how{};
    if (cudaGetDriverEntryPointByVersion(name, &found, driver_version, cudaEnableDefault, &how) != cudaSuccess ||
        found == nullptr)
        throw std::runtime_error(std::string("expected a driver of CUDA 12.5 or newer; got one without ") + name);
    return reinterpret_cast<F>(found);
}

void check(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS)
        throw std::runtime_error(std::string("expected ") + what + "; got status " + std::to_string(result));
}

}  // namespace

cudaStream_t stream_on(int device, int n) {
    static const auto device_of = driver<PFN_cuDeviceGet_v2000>("cuDeviceGet");
    static const auto resource_of = driver<PFN_cuDeviceGetDevResource_v12040>("cuDeviceGetDevResource");
    static const auto split = driver<PFN_cuDevSmResourceSplitByCount_v12040>("cuDevSmResourceSplitByCount");
    static const auto describe = driver<PFN_cuDevResourceGenerateDesc_v12040>("cuDevResourceGenerateDesc");
    static const auto create = driver<PFN_cuGreenCtxCreate_v12040>("cuGreenCtxCreate");
    static const auto create_stream = driver<PFN_cuGreenCtxStreamCreate_v12050>("cuGreenCtxStreamCreate");
    CUdevice at = 0;
    check(device_of(&at, device), "a device");
    CUdevResource all{};
    check(resource_of(at, &all, CU_DEV_RESOURCE_TYPE_SM), "multiprocessors");
    std::vector<CUdevResource> places(most_places);
    auto n_places = most_places;
    CUdevResource rest{};
    check(split(places.data(), &n_places, &all, &rest, CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, at_once),
          "multiprocessors in pairs");
    const auto wanted = static_cast<unsigned>(n) / at_once;
    if (wanted == 0 || wanted > n_places) throw std::runtime_error("expected room for readers; got none");
    CUdevResourceDesc kept{};
    check(describe(&kept, places.data(), wanted), "multiprocessors to keep");
    CUgreenCtx context = nullptr;
    check(create(&context, kept, at, CU_GREEN_CTX_DEFAULT_STREAM), "multiprocessors of its own");
    int least = 0;
    int most = 0;
    if (cudaDeviceGetStreamPriorityRange(&least, &most) != cudaSuccess)
        throw std::runtime_error("expected priorities; got none");
    CUstream stream = nullptr;
    check(create_stream(&stream, context, CU_STREAM_NON_BLOCKING, most), "a stream");
    return stream;
}

}  // namespace consumer
