#include "runtime/mtp/guesser.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "runtime/session.h"

namespace lkv {

namespace {

// A cache like the session's in what concerns sequences and threads. Its rows are f16: the window keeps them few.
SessionOptions own_options(const SessionOptions& of) {
    if (of.evicts()) {
        fail("mtp", "expected no --evict beside guesses, as they count in what goes; got ", of.evict);
    }
    SessionOptions own;
    own.n_ctx = of.n_ctx;
    own.n_seq_max = of.n_seq_max;
    own.n_batch = of.n_batch;
    own.n_ubatch = of.n_ubatch;
    own.n_threads = of.n_threads;
    own.n_threads_batch = of.n_threads_batch;
    own.implementation = of.implementation;
    own.prefill = "eager";
    return own;
}

struct Likeliest {
    int32_t token;
    double share;
};

Likeliest likeliest(std::span<const float> logits) {
    const auto best = std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit - *best));
    return {static_cast<int32_t>(best - logits.begin()), 1.0 / sum};
}

}  // namespace

Guesser::Guesser(const std::shared_ptr<const Model>& whole, const SessionOptions& options)
    : session_(std::make_unique<Session>(std::make_shared<const Model>(whole, options.mtp_path), own_options(options))),
      n_embd_(static_cast<size_t>(whole->hparams().n_embd)),
      sequences_(static_cast<size_t>(session_->options().n_seq_max)) {}

Guesser::~Guesser() = default;

double Guesser::cost() const { return session_->model().cost(); }
size_t Guesser::cache_bytes() const { return session_->cache().bytes().total(); }

const float* Guesser::state_at(int seq, int32_t pos) const {
    if (pos < 0) return nullptr;
    const Sequence& of = sequences_[static_cast<size_t>(seq)];
    const auto at = static_cast<size_t>(pos % n_kept);
    return of.pos[at] == pos ? of.states.data() + at * n_embd_ : nullptr;
}

void Guesser::note(int seq, int32_t pos, const float* state) {
    Sequence& of = sequences_[static_cast<size_t>(seq)];
    of.states.resize(n_kept * n_embd_);
    const auto at = static_cast<size_t>(pos % n_kept);
    of.pos[at] = pos;
    std::copy_n(state, n_embd_, of.states.data() + at * n_embd_);
}

void Guesser::forget_states(int seq, const Positions& positions) {
    for (int32_t& pos : sequences_[static_cast<size_t>(seq)].pos) {
        if (positions.have(pos)) pos = -1;
    }
}

// No row is left at `pos` and after it.
void Guesser::end_at(int seq, int32_t pos) {
    if (session_->placement().last(seq) < pos) return;
    if (!session_->cache().remove(seq, {pos})) session_->cache().remove_whole(seq);
}

void Guesser::follow(const Ubatch& ubatch) {
    tokens_.clear();
    pos_.clear();
    seq_.clear();
    before_.clear();
    uint64_t met = 0;
    for (size_t i = 0; i < ubatch.tokens.size(); i++) {
        const int seq = ubatch.seq[i];
        const int32_t pos = ubatch.pos[i];
        if ((met & bit(seq)) == 0) {
            end_at(seq, pos);
            forget_states(seq, {pos});
        }
        met |= bit(seq);
        if (const float* const state = state_at(seq, pos - 1)) {
            tokens_.push_back(ubatch.tokens[i]);
            pos_.push_back(pos);
            seq_.push_back(seq);
            before_.insert(before_.end(), state, state + n_embd_);
        }
        note(seq, pos, ubatch.states_after + i * n_embd_);
    }
    if (tokens_.empty()) return;
    const std::vector<uint8_t> none(tokens_.size(), 0);
    try {
        session_->decode(tokens_, pos_, seq_, none, [](size_t) { return nullptr; }, {}, {}, Result::logits, {},
                         {before_.data(), nullptr});
    } catch (const Error&) {  // no room: what it had is not worth the answer
        forget(-1);
    }
}

std::vector<int32_t> Guesser::guess(int seq, int32_t last, int32_t token, int most, float sure) {
    std::vector<int32_t> found;
    const float* const state = state_at(seq, last);
    if (state == nullptr) return found;
    end_at(seq, last + 1);
    std::vector<float> before(state, state + n_embd_);
    std::vector<float> after(n_embd_);
    std::vector<float> logits(static_cast<size_t>(session_->model().hparams().n_vocab));
    const std::vector<uint8_t> yes(1, 1);
    try {
        for (int32_t pos = last + 1; static_cast<int>(found.size()) < most; pos++) {
            session_->decode({&token, 1}, {&pos, 1}, {&seq, 1}, yes, [&](size_t) { return logits.data(); }, {}, yes,
                             Result::logits, {}, {before.data(), after.data()});
            const Likeliest next = likeliest(logits);
            if (next.share < static_cast<double>(sure)) break;
            token = next.token;
            found.push_back(token);
            before.swap(after);
        }
    } catch (const Error&) {  // no room
    }
    end_at(seq, last + 1);  // the rows of guesses were made of guessed states
    return found;
}

void Guesser::remove(int seq, const Positions& positions) {
    for (int s = 0; s < static_cast<int>(sequences_.size()); s++) {
        if (seq >= 0 && s != seq) continue;
        forget_states(s, positions);
        if (!session_->cache().remove(s, positions)) session_->cache().remove_whole(s);
    }
}

void Guesser::copy(int src, int dst, const Positions& positions) {
    if (src == dst) return;
    forget(dst);
    try {
        session_->cache().copy(src, dst, positions);
    } catch (const Error&) {  // its window has gone on
        return;
    }
    sequences_[static_cast<size_t>(dst)] = sequences_[static_cast<size_t>(src)];
    forget_states(dst, {positions.end});
}

void Guesser::keep(int seq) {
    for (int s = 0; s < static_cast<int>(sequences_.size()); s++) {
        if (s != seq) forget(s);
    }
}

void Guesser::forget(int seq) {
    if (seq < 0) session_->cache().clear();
    for (int s = 0; s < static_cast<int>(sequences_.size()); s++) {
        if (seq >= 0 && s != seq) continue;
        if (seq >= 0) session_->cache().remove_whole(s);
        sequences_[static_cast<size_t>(s)].pos.fill(-1);
    }
}

}  // namespace lkv
