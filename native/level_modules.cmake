# latentkv._core once per level (levels.cmake), each in a folder of its own: only ggml's CPU backend and our kernels differ, everything else
# is compiled once. Whole modules, so that no inline function that two levels share can be taken from the greater one.
add_library(latentkv_bindings OBJECT ${bindings})
target_compile_definitions(latentkv_bindings PRIVATE LATENTKV_VERSION="${PROJECT_VERSION}")
target_link_libraries(latentkv_bindings PRIVATE latentkv_native pybind11::module)
set_target_properties(latentkv_bindings PROPERTIES CXX_VISIBILITY_PRESET hidden)
latentkv_warnings(latentkv_bindings)

# libstdc++ is inside, and hidden (cmake/exports.cmake): a module and the GPU's library have one each.
set(contained_link_options -static-libstdc++ -static-libgcc -s)
if(LATENTKV_CUDA)
    include(gpu_library.cmake)
endif()

foreach(level IN LISTS level_names)
    set(module core_${level})
    set(objects)
    if(NOT level STREQUAL least_level)
        latentkv_at_level(latentkv_kernels kernels_${level} "${level_flags_${level}}")
        latentkv_at_level(ggml-cpu ggml_cpu_${level} "${level_flags_${level}}")
        set(objects $<TARGET_OBJECTS:kernels_${level}> $<TARGET_OBJECTS:ggml_cpu_${level}>)
    endif()
    # the level's objects first: of functions that others have too the linker takes the first
    pybind11_add_module(${module} MODULE NO_EXTRAS ${objects} $<TARGET_OBJECTS:latentkv_bindings>)
    if(LATENTKV_CUDA)
        latentkv_take_gpu_library(${module})
    endif()
    target_link_libraries(${module} PRIVATE latentkv_native)
    target_link_options(${module} PRIVATE ${contained_link_options})
    latentkv_exports(${module} module)
    set_target_properties(${module} PROPERTIES
        OUTPUT_NAME _core LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/levels/${level})
    install(TARGETS ${module} DESTINATION latentkv/levels/${level})
endforeach()
