# latentkv_kernels: row formats, row layout and attention kernels. Knows no ggml.
add_library(latentkv_kernels STATIC
    ${CMAKE_CURRENT_LIST_DIR}/src/cache/formats.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/cache/row.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/cache/row_moves.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/cache/row_plan.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/attn_mass.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/codes/code_scores.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/codes/code_values.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/combine.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/direct.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/partial.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/plan.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/rebuild.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/cpu/tile.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/ops/latent_attn.cpp
)
target_include_directories(latentkv_kernels PUBLIC ${CMAKE_CURRENT_LIST_DIR}/src)
target_compile_features(latentkv_kernels PUBLIC cxx_std_20)
set_target_properties(latentkv_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF)

# -Wno-psabi: vector types cross inlined calls only, so the calling convention note does not apply.
latentkv_warnings(latentkv_kernels)
target_compile_options(latentkv_kernels PUBLIC -Wno-psabi)

if(LATENTKV_NATIVE)
    target_compile_options(latentkv_kernels PUBLIC -march=native)
else()
    target_compile_options(latentkv_kernels PRIVATE ${least_level_flags})
endif()
