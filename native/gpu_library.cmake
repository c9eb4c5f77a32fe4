# liblatentkv_gpu.so: what runs on a GPU, once beside the modules of the levels (level_modules.cmake). CUDA's own libraries are not in it:
# the packages nvidia-cuda-runtime and nvidia-cublas put them in nvidia/cu13/lib, beside the package latentkv.
set(gpu_parts ggml-base ggml-cuda latentkv_kernels latentkv_cuda latentkv_ggml_stream)
list(TRANSFORM gpu_parts REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE gpu_objects)
add_library(latentkv_gpu SHARED ${gpu_objects})
find_package(Threads REQUIRED)
target_link_libraries(latentkv_gpu PRIVATE CUDA::cudart CUDA::cublas Threads::Threads ${CMAKE_DL_LIBS})
target_link_options(latentkv_gpu PRIVATE ${contained_link_options} -Wl,--no-undefined)
latentkv_exports(latentkv_gpu gpu_library)
set_target_properties(latentkv_gpu PROPERTIES
    LINKER_LANGUAGE CXX INSTALL_RPATH "$ORIGIN/../../nvidia/cu13/lib" INSTALL_REMOVE_ENVIRONMENT_RPATH ON)
install(TARGETS latentkv_gpu LIBRARY DESTINATION latentkv/lib)

# To be called before the module links anything else: of the static libraries with the same functions nothing is taken again.
function(latentkv_take_gpu_library module)
    target_link_libraries(${module} PRIVATE latentkv_gpu)
    target_link_options(${module} PRIVATE -Wl,--as-needed)
    set_target_properties(${module} PROPERTIES INSTALL_RPATH "$ORIGIN/../../lib:$ORIGIN/../../../nvidia/cu13/lib")
endfunction()
