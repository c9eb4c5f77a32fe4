#include "runtime/session.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "devices/gpus.h"
#include "runtime/mtp/guesser.h"
#include "runtime/plan/rotation.h"

namespace lkv {

namespace {

// Asks `stop` after each node of what the CPU computes while this lives.
class StopBetweenNodes {
public:
    StopBetweenNodes(ggml_backend_t cpu, const std::function<bool()>* stop) : cpu_(cpu), stop_(stop) {
        const auto asked = [](void* self) { return (*static_cast<StopBetweenNodes*>(self)->stop_)(); };
        if (stop != nullptr && *stop) ggml_backend_cpu_set_abort_callback(cpu_, asked, this);
    }
    ~StopBetweenNodes() { ggml_backend_cpu_set_abort_callback(cpu_, nullptr, nullptr); }
    StopBetweenNodes(const StopBetweenNodes&) = delete;
    StopBetweenNodes& operator=(const StopBetweenNodes&) = delete;

private:
    ggml_backend_t cpu_;
    const std::function<bool()>* stop_;
};

const std::shared_ptr<const Model>& runnable(const std::shared_ptr<const Model>& model, const SessionOptions& options) {
    require_runnable(*model, options);
    model->warn_if_gpu_absent();
    return model;
}

size_t free_on_gpu(int gpu) { return gpu_bytes(gpu).free; }

}  // namespace

Session::Session(const std::shared_ptr<const Model>& model, const SessionOptions& options)
    : Session{runnable(model, options), resolve(*model, options, free_on_gpu)} {
    if (!options.mtp) return;
    if (prefill_ == Prefill::lazy) {
        fail("mtp", "expected prompts that are compressed as they come; got --prefill lazy");
    }
    guesser_ = std::make_unique<Guesser>(model, options);
}

Session::~Session() = default;

Session::Session(std::shared_ptr<const Model> model, const SessionPlan& plan)
    : model_(std::move(model)),
      prefill_(plan.prefill),
      runner_(*model_, plan),
      cache_(model_->hparams(), model_->cache_spec(), plan.cache, true, runner_.devices()),
      lazy_prefill_(*model_, cache_, runner_),
      states_(*model_, cache_, runner_.attach(cache_, plan.kv_rotate)) {
    for (const std::string& warning : plan.warnings) log(LogLevel::warning, warning);
    const KvBytes bytes = cache_.bytes();
    const unsigned rotated = runner_.rotated();
    log(LogLevel::info, "kv: ", cache_.options().n_ctx, " cells, K ", bytes.k >> 10, " KiB, V ", bytes.v >> 10,
        " KiB, ", static_cast<int>(100.0 * bytes.share + 0.5), " % of f16 per token, rotated rows: K ",
        (rotated & 1U) != 0 ? "yes" : "no", ", V ", (rotated & 2U) != 0 ? "yes" : "no");
    log(LogLevel::info, "latent_attn: ", implementation());
}

void Session::check_batch(std::span<const int32_t> tokens, std::span<const int32_t> pos,
                          std::span<const int32_t> seq) const {
    const HParams& h = model_->hparams();
    std::vector<int32_t> last(static_cast<size_t>(cache_.options().n_seq_max), -2);  // -2: not looked up yet
    for (size_t i = 0; i < tokens.size(); i++) {
        if (tokens[i] < 0 || tokens[i] >= h.n_vocab) {
            fail("decode", "expected tokens from 0 to ", h.n_vocab - 1, "; got ", tokens[i]);
        }
        cache_.placement().check_seq(seq[i]);
        int32_t& previous = last[static_cast<size_t>(seq[i])];
        if (previous == -2) {
            previous = cache_.placement().last(seq[i]);
        }
        if (pos[i] <= previous) {
            fail("decode", "expected a position above ", previous, ", the last of sequence ", seq[i], "; got ", pos[i]);
        }
        if (h.block.position == Position::learned && pos[i] >= h.n_ctx_train) {
            fail("context", "expected positions below ", h.n_ctx_train, ", the learned ones; got ", pos[i]);
        }
        previous = pos[i];
    }
    cache_.placement().check_room(tokens.size());
}

void Session::decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                     std::span<const uint8_t> output, float* logits, const std::function<void()>& between_ubatches) {
    const auto room = [&logits, width = static_cast<size_t>(model_->hparams().n_vocab)](size_t n) {
        return std::exchange(logits, logits + n * width);
    };
    decode(tokens, pos, seq, output, room, between_ubatches);
}

void Session::decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                     std::span<const uint8_t> output, const ResultRoom& room,
                     const std::function<void()>& between_ubatches, std::span<const uint8_t> guessed, Result result,
                     const std::function<bool()>& stop, const BatchStates& states) {
    check_batch(tokens, pos, seq);
    const StopBetweenNodes stops(runner_.cpu(), cache_.placement().eviction() == nullptr ? &stop : nullptr);
    check_guesses(seq, guessed);
    if (prefill_ == Prefill::lazy && lazy_prefill_.starts(seq)) {
        lazy_prefill_.run({tokens, pos, seq, output, room, between_ubatches, result});
        return;
    }
    Guesses guesses{};
    for (size_t first = 0, n = 0; first < tokens.size(); first += n) {
        const EqualRuns ubatch = next_ubatch(seq.subspan(first), output.subspan(first));
        n = ubatch.n_tokens;
        const std::vector<int32_t> out_ids = wanted(output.subspan(first, n));
        const std::span<const uint8_t> own = guessed.empty() ? guessed : guessed.subspan(first, n);
        for (size_t i = 0; i < own.size(); i++) guesses[static_cast<size_t>(seq[first + i])] += own[i];
        Ubatch run{tokens.subspan(first, n), pos.subspan(first, n), seq.subspan(first, n), out_ids, result};
        const size_t at = first * static_cast<size_t>(model_->hparams().n_embd);
        if (states.before != nullptr) run.states_before = states.before + at;
        if (states.after != nullptr) run.states_after = states.after + at;
        if (guesser_ != nullptr) {
            followed_.resize(n * static_cast<size_t>(model_->hparams().n_embd));
            run.states_after = followed_.data();
        }
        runner_.run(run, ubatch, guesses_of_runs(own, ubatch), room(out_ids.size()));
        if (guesser_ != nullptr) guesser_->follow(run);
        if (cache_.states().is_used()) runner_.keep_snapshots(ubatch);
        cache_.demote(guesses);
        if (between_ubatches) {
            between_ubatches();
        }
    }
}

void Session::check_guesses(std::span<const int32_t> seq, std::span<const uint8_t> guessed) const {
    if (guessed.empty()) return;
    if (guessed.size() != seq.size()) {
        fail("decode", "expected ", seq.size(), " flags of guesses, one a token; got ", guessed.size());
    }
    Guesses guesses{};
    for (size_t i = 0; i < seq.size(); i++) {
        int32_t& n = guesses[static_cast<size_t>(seq[i])];
        if (guessed[i] == 0 && n > 0) {
            fail("decode", "expected guesses behind all other tokens of their sequence; got token ", i, " behind ", n);
        }
        n += guessed[i];
    }
    const int32_t n_guesses = std::accumulate(guesses.begin(), guesses.end(), 0);
    if (n_guesses > 0 && cache_.placement().eviction() != nullptr) {
        fail("decode", "expected no guesses under eviction, as they count in what goes; got ", n_guesses,
             "; leave out the draft model or --evict");
    }
}

EqualRuns Session::next_ubatch(std::span<const int32_t> seq, std::span<const uint8_t> output) const {
    const bool settles = runner_.fused() && cache_.placement().cells(cache_.placement().middle()).block() == 1;
    const size_t limit = cache_.options().ubatches.next(seq, output, cache_.placement().most_exact(), settles);
    return cache_.states().is_used() ? first_equal_runs(seq, output, limit) : EqualRuns{limit, 1, false};
}

bool Session::remove(int seq, const Positions& positions) {
    if (!cache_.remove(seq, positions)) return false;
    if (guesser_ != nullptr) guesser_->remove(seq, positions);
    return true;
}

void Session::copy(int src, int dst, const Positions& positions) {
    cache_.copy(src, dst, positions);
    if (guesser_ != nullptr) guesser_->copy(src, dst, positions);
}

void Session::keep(int seq) {
    cache_.keep(seq);
    if (guesser_ != nullptr) guesser_->keep(seq);
}

void Session::clear() {
    cache_.clear();
    if (guesser_ != nullptr) guesser_->forget(-1);
}

std::string Session::set_state(std::span<const uint8_t> state, Accept accept) {
    if (guesser_ != nullptr) guesser_->forget(-1);
    return states_.set_whole(state, accept);
}

std::string Session::set_seq_state(int seq, std::span<const std::span<const uint8_t>> parts, Accept accept) {
    if (guesser_ != nullptr) guesser_->forget(seq);
    return states_.set_sequence(seq, parts, accept);
}

std::vector<int32_t> Session::guess(int seq, int32_t token, int most, float sure) {
    cache_.placement().check_seq(seq);
    if (guesser_ == nullptr) fail("mtp", "expected a session that guesses (mtp=True); got one without");
    if (token < 0 || token >= model_->hparams().n_vocab) {
        fail("mtp", "expected a token from 0 to ", model_->hparams().n_vocab - 1, "; got ", token);
    }
    if (most < 0 || most > most_guesses) fail("mtp", "expected 0 to ", most_guesses, " guesses; got ", most);
    return guesser_->guess(seq, cache_.placement().last(seq), token, most, sure);
}

bool Session::can_rotate() const { return rotates_full(*model_, cache_, false) || rotates_full(*model_, cache_, true); }

void Session::shift(int seq, const Positions& positions, int32_t delta) {
    const HParams& h = model_->hparams();
    for (int il = 0; !h.is_recurrent() && cache_.placement().eviction() == nullptr && il < h.n_layer; il++) {
        const KPath path = model_->cache_spec().layers[static_cast<size_t>(il)].k_path;
        if (h.block.position == Position::learned) {
            fail("context shift",
                 "expected rotary or ALiBi positions; got learned ones, which live in the hidden states");
        }
        const bool is_free = path == KPath::rebuild || path == KPath::value || !h.makes_rows(il);
        if (h.block.position == Position::rope && !is_free) {
            fail("context shift", "expected K `rebuild` in every layer, whose rows carry no position; got ",
                 path_name(path), " in layer ", il);
        }
    }
    cache_.shift(seq, positions, delta);
    if (guesser_ != nullptr) guesser_->forget(seq);
}

}  // namespace lkv
