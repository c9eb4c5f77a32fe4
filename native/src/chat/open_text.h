// The end of an answer that breaks off inside a text: as long as that text goes on, what follows is read without parsing the
// whole answer anew.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chat.h"
#include "peg-parser.h"

namespace lkv {

class OpenText {
public:
    // What the text is part of: where the mapper of a message puts it.
    enum class Part { none, content, reasoning, arguments, string_argument };

    explicit OpenText(const common_chat_parser_params& params);

    // Looks where the answer `text` ends, of which a parse made `message`.
    void find(std::string_view text, const common_chat_msg& message);

    bool is_open() const { return part_ != Part::none; }
    Part part() const { return part_; }

    // What `text` adds, which begins with the text that find() saw: bytes from the last call on that belong to the open text
    // whatever follows. Where the text ends in them, it is not open any more, and nothing is returned.
    std::string_view take(std::string_view text);

private:
    // How parsers of one tag end.
    struct Ends {
        bool known = true;                    // each of them is a text up to a delimiter, or JSON
        std::vector<std::string> delimiters;  // of all of them
    };

    Ends ends_of(const char* tag) const;
    void add_ends(common_peg_parser_id id, Ends& ends) const;
    void open(Part part, const Ends* ends, size_t read);
    size_t take_until_delimiter(std::string_view more);
    size_t take_json_string(std::string_view more);

    const common_chat_parser_params& params_;
    bool is_plain_;  // the mapper is the one of most formats
    Ends content_;
    Ends reasoning_;
    Ends string_argument_;

    Part part_ = Part::none;
    const Ends* ends_ = nullptr;  // of the open text; null: it is a string of JSON
    size_t read_ = 0;             // bytes of the answer that were taken
};

// The inside of a JSON string that says this.
std::string escaped(std::string_view text);

}  // namespace lkv
