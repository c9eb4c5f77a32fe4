# latentkv_cuda: the CUDA kernels, which know no ggml; and, where ggml is built, the executor that launches them inside it.
find_package(CUDAToolkit REQUIRED)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)

set(cuda_dir ${CMAKE_CURRENT_LIST_DIR}/src/ops/cuda)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${cuda_dir}/*.cu ${cuda_dir}/*.cpp)
add_library(latentkv_cuda STATIC ${cuda_sources})
# Products by warpgroups are machine code of compute capability 9.0 itself, 90a; newer GPUs start from 90's intermediate code.
set(architectures ${CMAKE_CUDA_ARCHITECTURES})
list(TRANSFORM architectures REPLACE "^90$" "90a-real;90-virtual")
list(TRANSFORM architectures REPLACE "^90-real$" "90a-real")
set_target_properties(latentkv_cuda PROPERTIES CUDA_ARCHITECTURES "${architectures}")
target_include_directories(latentkv_cuda PUBLIC ${CMAKE_CURRENT_LIST_DIR}/src)
target_compile_features(latentkv_cuda PUBLIC cxx_std_20)
target_link_libraries(latentkv_cuda PUBLIC latentkv_kernels CUDA::cudart)
set_target_properties(latentkv_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON)

# ggml-cuda's private headers: the type of its backend's context, which owns the stream.
set(ggml_src ${LATENTKV_LLAMA_CPP_DIR}/ggml/src)
add_library(latentkv_ggml_stream STATIC ${CMAKE_CURRENT_LIST_DIR}/src/runtime/cuda/ggml/stream.cu)
target_include_directories(latentkv_ggml_stream SYSTEM PRIVATE ${ggml_src})
target_include_directories(latentkv_ggml_stream PRIVATE ${CMAKE_CURRENT_LIST_DIR}/src)
target_link_libraries(latentkv_ggml_stream PUBLIC ggml CUDA::cudart)
set_target_properties(latentkv_ggml_stream PROPERTIES POSITION_INDEPENDENT_CODE ON)

file(GLOB executor CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/src/runtime/cuda/*.cpp
     ${CMAKE_CURRENT_LIST_DIR}/src/runtime/cuda/slots/*.cpp)
target_sources(latentkv_native PRIVATE ${executor} ${CMAKE_CURRENT_LIST_DIR}/src/devices/cuda_gpus.cpp)
target_include_directories(latentkv_native SYSTEM PRIVATE ${ggml_src})
target_link_libraries(latentkv_native PUBLIC latentkv_cuda latentkv_ggml_stream)
target_compile_definitions(latentkv_native PUBLIC LATENTKV_CUDA_BUILD)
