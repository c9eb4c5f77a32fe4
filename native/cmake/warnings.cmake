# Warnings of our own targets. They are errors where tests are built; a user's compiler, newer than ours, may warn of more.

if(NOT DEFINED LATENTKV_WERROR)
    set(LATENTKV_WERROR ${LATENTKV_BUILD_TESTS})
endif()

function(latentkv_warnings target)
    target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic)
    if(LATENTKV_WERROR)
        target_compile_options(${target} PRIVATE -Werror)
    endif()
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
        # its range analysis sees memmove past the end inside vector::insert (GCC bug 105562 and its kin)
        target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
    endif()
endfunction()
