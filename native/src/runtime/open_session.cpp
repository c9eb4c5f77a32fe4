// A session is opened: its cache, its stages and what runs them, and what it says of itself.
#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "devices/gpus.h"
#include "runtime/plan/rotation.h"
#include "runtime/session.h"

namespace lkv {
namespace {

const std::shared_ptr<const Model>& runnable(const std::shared_ptr<const Model>& model, const SessionOptions& options) {
    require_runnable(*model, options);
    model->warn_if_gpu_absent();
    return model;
}

size_t free_on_gpu(int gpu) { return gpu_bytes(gpu).free; }

}  // namespace

Session::Session(const std::shared_ptr<const Model>& model, const SessionOptions& options)
    : Session{runnable(model, options), resolve(*model, options, free_on_gpu)} {}

Session::Session(std::shared_ptr<const Model> model, const SessionPlan& plan)
    : model_(std::move(model)),
      fused_(plan.fused),
      prefill_(plan.prefill),
      n_threads_(plan.n_threads),
      n_threads_batch_(plan.n_threads_batch),
      stages_(open_stages(model_->runs())),
      cache_(model_->hparams(), model_->cache_spec(), plan.cache, true, devices_of(stages_)),
      ropes_(read_ropes(model_->file(), model_->hparams(), cache_.options().n_ctx)) {
    if (cache_.states().is_used()) attach_states();
    attach_stages(plan.kv_rotate);
    for (const std::string& warning : plan.warnings) log(LogLevel::warning, warning);
    ggml_threadpool_params params = ggml_threadpool_params_default(std::max(n_threads_, n_threads_batch_));
    threadpool_.reset(ggml_threadpool_new(&params));
    backend_.reset(ggml_backend_cpu_init());
    if (threadpool_ == nullptr || backend_ == nullptr) {
        fail("threads", "expected a pool of ", params.n_threads, " threads; got none from the system");
    }
    ggml_backend_cpu_set_threadpool(backend_.get(), threadpool_.get());
    ggml_backend_cpu_set_n_threads(backend_.get(), n_threads_);  // a state may need latents before any graph has run
    if (!stages_.front().on_gpu()) {
        encoder_.emplace(*model_, backend_.get());
        cache_.rows().set_encoder(&*encoder_);
    }
    const KvBytes bytes = cache_.bytes();
    log(LogLevel::info, "kv: ", cache_.options().n_ctx, " cells, K ", bytes.k >> 10, " KiB, V ", bytes.v >> 10,
        " KiB, ", static_cast<int>(100.0 * bytes.share + 0.5), " % of f16 per token, rotated rows: K ",
        (rotated() & 1U) != 0 ? "yes" : "no", ", V ", (rotated() & 2U) != 0 ? "yes" : "no");
    log(LogLevel::info, "latent_attn: ", implementation());
}

void Session::attach_stages(bool kv_rotate) {
    const bool rotate_k = kv_rotate && rotates_full(*model_, cache_, false);
    const bool rotate_v = kv_rotate && rotates_full(*model_, cache_, true);
    for (PipelineStage& stage : stages_) {
        ggml_backend_buffer_type_t const where = model_->memory(stage.run);
        stage.constants = make_graph_constants(model_->hparams(), ropes_, rotate_k, rotate_v, where);
        stage.allocator.reset(ggml_gallocr_new(where));
        if (stage.on_gpu()) stage.gpu->attach(*model_, cache_, ropes_, stage.constants, stage.run);
    }
}

std::string Session::implementation() const {
    if (model_->on_gpu()) {
        const std::string fused = "fused cuda, " + stages_.back().gpu->name();
        return model_->on_one_device() ? fused : fused + "; " + runs_text(model_->runs());
    }
    if (!fused_) return "reference, stock ggml ops (fused cpu: not asked for)";
    return model_->gpu_asked() ? "fused cpu (cuda: " + model_->gpu_absent() + ")" : "fused cpu";
}

size_t Session::compute_bytes() const {
    size_t bytes = 0;
    for (const PipelineStage& stage : stages_) bytes += ggml_gallocr_get_buffer_size(stage.allocator.get(), 0);
    return bytes;
}

}  // namespace lkv
