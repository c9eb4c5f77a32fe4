# llama.cpp's chat code: templates, tool calls, reasoning, JSON schemas. Of common/ only these files, unmodified: the rest (arguments,
# downloads, HTTP, speculation) would double the time. What these take from it is ours, in native/src/chat/support.cpp.
# 16 files, one minute of one core. Objects, not a library: they and support.cpp need each other.
set(common ${LATENTKV_LLAMA_CPP_DIR}/common)
add_library(llama_chat OBJECT
    ${common}/chat-auto-parser-generator.cpp
    ${common}/chat-auto-parser-helpers.cpp
    ${common}/chat-diff-analyzer.cpp
    ${common}/chat-peg-parser.cpp
    ${common}/chat.cpp
    ${common}/json-schema-to-grammar.cpp
    ${common}/json.cpp
    ${common}/peg-parser.cpp
    ${common}/trie.cpp
    ${common}/unicode.cpp
    ${common}/jinja/caps.cpp
    ${common}/jinja/lexer.cpp
    ${common}/jinja/parser.cpp
    ${common}/jinja/runtime.cpp
    ${common}/jinja/string.cpp
    ${common}/jinja/value.cpp)
target_include_directories(llama_chat SYSTEM PUBLIC ${common} PRIVATE ${LATENTKV_LLAMA_CPP_DIR}/vendor)
target_compile_options(llama_chat PRIVATE -w)
target_link_libraries(llama_chat PUBLIC llama)
# native/src/chat/limits.cpp stands between a template and its functions: a file must not make range() take all memory
set_source_files_properties(${common}/jinja/value.cpp PROPERTIES COMPILE_DEFINITIONS global_builtins=unlimited_builtins)
