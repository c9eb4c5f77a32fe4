#include "chat/json_schema.h"

#include "base/error.h"
#include "base/log.h"
#include "chat/limits.h"
#include "json-schema-to-grammar.h"
#include "json.h"

namespace lkv {
namespace {

// What the converter would take for a grammar without a text, or for another schema.
void check_list(const common_json& schema, const char* key) {
    if (schema.contains(key) && (!schema.at(key).is_array() || schema.at(key).empty())) {
        fail("json_schema", "expected a list of at least one value for ", key, "; got ", quoted(schema.at(key).dump()));
    }
}

void check_order(const common_json& schema, const char* low, const char* high) {
    for (const char* key : {low, high}) {
        if (schema.contains(key) && !schema.at(key).is_number()) {
            fail("json_schema", "expected a number for ", key, "; got ", quoted(schema.at(key).dump()));
        }
    }
    if (schema.contains(low) && schema.contains(high) && schema.at(low).get<double>() > schema.at(high).get<double>()) {
        fail("json_schema", "expected ", low, " of at most ", high, "; got ", schema.at(low).dump(), " and ",
             schema.at(high).dump());
    }
}

void check_schema(const common_json& schema);

void check_schemas(const common_json& values) {
    if (!values.is_array() && !values.is_object()) return;
    for (const auto& item : values.items()) {
        check_schema(item.value());
    }
}

void check_schema(const common_json& schema) {
    if (!schema.is_object()) return;
    for (const char* key : {"enum", "anyOf", "oneOf", "allOf"}) {
        check_list(schema, key);
    }
    check_order(schema, "minItems", "maxItems");
    check_order(schema, "minLength", "maxLength");
    check_order(schema, "minimum", "maximum");
    for (const char* key : {"anyOf", "oneOf", "allOf", "prefixItems", "properties", "$defs", "definitions"}) {
        if (schema.contains(key)) check_schemas(schema.at(key));
    }
    for (const char* key : {"items", "additionalProperties"}) {
        if (schema.contains(key)) check_schema(schema.at(key));
    }
}

}  // namespace

std::string json_schema_to_grammar(std::string_view schema) {
    check_nesting("json_schema", schema);
    const LibraryErrorCapture capture;
    try {
        const auto parsed = common_json::parse(std::string(schema));
        if (!parsed.is_object() && !parsed.is_boolean()) {
            fail("json_schema", "expected a JSON object; got ", quoted(schema));
        }
        check_schema(parsed);
        return ::json_schema_to_grammar(parsed, /*force_gbnf=*/true);
    } catch (const Error&) {
        throw;
    } catch (const std::exception& error) {
        fail("json_schema", "expected a schema that a grammar can say; got ", reason(error));
    }
}

std::string reason(const std::exception& error) {
    std::string_view text = error.what();
    constexpr std::string_view marks[] = {"\nError: ", "Jinja Exception: "};
    for (const std::string_view mark : marks) {
        if (const size_t at = text.rfind(mark); at != std::string_view::npos) {
            text.remove_prefix(at + mark.size());
        }
    }
    std::string out;
    for (const char c : text.substr(0, 300)) {
        const bool blank = c == ' ' || c == '\n' || c == '\t' || c == '\r';
        if (!blank) {
            out += c;
        } else if (!out.empty() && out.back() != ' ') {
            out += ' ';
        }
    }
    while (!out.empty() && out.back() == ' ') {
        out.pop_back();
    }
    return out;
}

}  // namespace lkv
