# A module shows Python one symbol, and nothing of the standard library that may be inside it: some compilers have a libstdc++ for static
# linking alone. Its unique symbols (STB_GNU_UNIQUE) would be merged with those of the libstdc++ that numpy or torch loaded, even though
# Python opens modules apart, and then one library works with the other's objects: a segmentation fault in std::regex.

# Only the symbols of cmake/NAME.map leave the shared library `target`.
function(latentkv_exports target name)
    set(map ${PROJECT_SOURCE_DIR}/native/cmake/${name}.map)
    if(APPLE)
        if(name STREQUAL "module")
            target_link_options(${target} PRIVATE -Wl,-exported_symbol,_PyInit__core)
        endif()
    elseif(UNIX)
        target_link_options(${target} PRIVATE -Wl,--version-script=${map})
        set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${map})
    endif()
endfunction()
