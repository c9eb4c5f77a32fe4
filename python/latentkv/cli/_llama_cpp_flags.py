"""llama.cpp's flags that latentkv has not, and what becomes of each: data, read by _llama_cpp.py.

A row: commands, or * for all | flags, then VALUE or [choice|…] of one that may be left out | verdict | words.

    equals FLAG      the same as ours
    ignored          changes no answer; the words say why nothing is to be done
    ignored at A,B   at these values; refused with the words at any other
    refused          would change answers or do something else; the words say what to write instead
"""

TABLE = r"""
# the model and where its bytes come from
* | -hfr USER/REPO[:QUANT] | equals -hf
* | -mu --model-url URL | refused | download it, or name its repository with -hf USER/REPO
* | -hft --hf-token TOKEN | refused | set HF_TOKEN in the environment
* | --offline | refused | set HF_HUB_OFFLINE=1 in the environment
* | -dr --docker-repo NAME | refused | pass a FILE or -hf USER/REPO
* | -cl --cache-list | refused | see hf cache scan
* | --mlock | ignored | weights are mapped; the system keeps what is used
* | --mmap | ignored | weights are mapped
* | -dio --direct-io [0|1] | ignored | weights are mapped
* | -ndio --no-direct-io | ignored | weights are mapped
* | -lm --load-mode MODE | ignored at auto,mmap,mlock,mmap+mlock | --no-mmap to read the weights into memory
* | --check-tensors | ignored | files are always checked
* | --no-host [0|1] | ignored | weights are mapped
* | --repack | ignored | weights stay in the file's own blocks
* | -nr --no-repack | ignored | weights stay in the file's own blocks
* | --override-kv KEY=TYPE:VALUE | refused | convert the checkpoint again with the key changed
* | --lora FILE | refused | merge the adapter into the weights, then convert
* | --lora-scaled FILE:SCALE | refused | merge the adapter into the weights, then convert
* | --lora-base FILE | refused | merge the adapter into the weights, then convert
serve | --lora-init-without-apply | refused | merge the adapter into the weights, then convert
* | --control-vector FILE | refused | leave it out; there are no control vectors
* | --control-vector-scaled FILE:SCALE | refused | leave it out; there are no control vectors
* | --control-vector-layer-range START | refused | leave it out; there are no control vectors
* | -mm --mmproj FILE | refused | leave it out; models are run on text alone
* | -mmu --mmproj-url URL | refused | leave it out; models are run on text alone
* | --mmproj-auto | ignored | models are run on text alone
* | --no-mmproj --no-mmproj-auto | ignored | models are run on text alone
* | --mmproj-offload | ignored | models are run on text alone
* | --no-mmproj-offload | ignored | models are run on text alone
* | -mmdev --mmproj-device DEVICE | refused | leave it out; models are run on text alone
chat | --image --audio --video FILE | refused | leave it out; models are run on text alone
* | --image-min-tokens N | refused | leave it out; models are run on text alone
* | --image-max-tokens N | refused | leave it out; models are run on text alone
* | --mtmd-batch-max-tokens N | refused | leave it out; models are run on text alone

# RoPE: what the file says holds
* | --rope-scaling TYPE | refused | leave it out; the file says how its context is extended
* | --rope-scale N | refused | leave it out; the file says how its context is extended
* | --rope-freq-base N | refused | leave it out; the file says how its context is extended
* | --rope-freq-scale N | refused | leave it out; the file says how its context is extended
* | --yarn-orig-ctx N | refused | leave it out; the file says how its context is extended
* | --yarn-ext-factor N | refused | leave it out; the file says how its context is extended
* | --yarn-attn-factor N | refused | leave it out; the file says how its context is extended
* | --yarn-beta-slow N | refused | leave it out; the file says how its context is extended
* | --yarn-beta-fast N | refused | leave it out; the file says how its context is extended
* | -gan --grp-attn-n N | ignored at 1 | leave it out; -c is at most what the file was trained for
* | -gaw --grp-attn-w N | ignored | without --grp-attn-n it does nothing

# attention and the cache
* | -fa --flash-attn [on|off|auto|0|1|0,1] | ignored | attention is always fused
* | -kvo --kv-offload | ignored | the cache lies where its layers run
* | -nkvo --no-kv-offload [0|1] | refused | -ngl N: the cache lies where its layers run
* | --swa-full | ignored | layers with a sliding window hold their window
* | -ctxcp --ctx-checkpoints --swa-checkpoints N | ignored | the server keeps states by --cache-ram
* | -cms --checkpoint-min-step N | ignored | the server keeps states by --cache-ram
* | -dt --defrag-thold N | ignored | slots may lie in any order
* | -nocb --no-cont-batching | ignored | requests always share steps
* | -cb --cont-batching | ignored | requests always share steps
* | -kvu --kv-unified | ignored | one cache serves all sequences
* | -no-kvu --no-kv-unified | ignored | one cache serves all sequences
* | --op-offload | ignored | operations run where their layer is
* | -nopo --no-op-offload [0|1] | ignored | operations run where their layer is
chat perplexity bench info | --context-shift | refused | -c N, a larger context (serve has --context-shift)
* | --no-context-shift | ignored | nothing is shifted without --context-shift
chat perplexity bench info | --keep N | ignored | nothing is shifted without --context-shift
chat | -cram --cache-ram N | ignored | a conversation stays in its cache
serve | -cram N | equals --cache-ram
serve | --cache-idle-slots | ignored | sequences that lose their place are kept by --cache-ram
serve | --no-cache-idle-slots | equals --cache-ram 0
serve | --cache-prompt | ignored | beginnings that are cached are always reused
serve | --no-cache-prompt | refused | "cache_prompt": false in a request
chat | --prompt-cache FILE | refused | /save FILE and /load FILE in a conversation
chat | --prompt-cache-all | refused | /save FILE and /load FILE in a conversation
chat | --prompt-cache-ro | refused | /load FILE in a conversation

# devices and threads
* | --n-gpu-layers N | equals -ngl
* | -dev --device NAMES | ignored at none | -ngl 0 for the CPU, --main-gpu I or --tensor-split N,N for GPUs
* | --list-devices | refused | latentkv info FILE -ngl auto: what runs where
* | -ot --override-tensor PATTERN=TYPE | refused | -ngl N: whole layers on GPUs, the others on the CPU
* | -cmoe --cpu-moe | refused | -ngl N: whole layers on GPUs, the others on the CPU
* | -ncmoe --n-cpu-moe N | refused | -ngl N: whole layers on GPUs, the others on the CPU
* | -fit --fit [on|off] | ignored | -ngl auto and -c auto take what fits
* | -fitp --fit-print [on|off] | ignored | what was fitted is always said
* | -fitt --fit-target MIB | refused | -ngl N and -c N
* | -fitc --fit-ctx N | refused | -c N
* | --rpc SERVERS | refused | leave it out; layers are shared among the GPUs of one machine
* | --numa TYPE | ignored | numactl binds a process
* | -C --cpu-mask MASK | ignored | taskset binds a process
* | -Cr --cpu-range RANGE | ignored | taskset binds a process
* | --cpu-strict N | ignored | taskset binds a process
* | --prio N | ignored | nice sets a priority
* | --poll N | ignored | threads wait as they see fit
* | -Cb --cpu-mask-batch MASK | ignored | taskset binds a process
* | -Crb --cpu-range-batch RANGE | ignored | taskset binds a process
* | --cpu-strict-batch N | ignored | taskset binds a process
* | --prio-batch N | ignored | nice sets a priority
* | --poll-batch N | ignored | threads wait as they see fit
* | --warmup | ignored | the first step needs none
* | --no-warmup | ignored | the first step needs none
* | --perf | ignored | figures are always shown
* | --no-perf | ignored | figures cost nothing

# guesses ahead
* | -md --model-draft --spec-draft-model FILE | refused | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | -hfd -hfrd --hf-repo-draft --spec-draft-hf REPO | refused | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | --spec-type TYPES | ignored at none | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | --spec-default | refused | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | --mtp | refused | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | --dflash | refused | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | --eagle3 | refused | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | --draft --draft-n --draft-max N | refused | leave it out; in Python, Llama(draft_model=LlamaPromptLookupDecoding())
* | --draft-min --draft-n-min N | ignored | nothing is drafted
* | --spec-draft-n-max N | ignored | nothing is drafted
* | --spec-draft-n-min N | ignored | nothing is drafted
* | --spec-draft-p-split --draft-p-split P | ignored | nothing is drafted
* | --spec-draft-p-min --draft-p-min P | ignored | nothing is drafted
* | --spec-draft-backend-sampling | ignored | nothing is drafted
* | --no-spec-draft-backend-sampling | ignored | nothing is drafted
* | -td --threads-draft --spec-draft-threads N | ignored | nothing is drafted
* | -tbd --threads-batch-draft --spec-draft-threads-batch N | ignored | nothing is drafted
* | -Cd --cpu-mask-draft --spec-draft-cpu-mask M | ignored | nothing is drafted
* | -Crd --cpu-range-draft --spec-draft-cpu-range R | ignored | nothing is drafted
* | --cpu-strict-draft --spec-draft-cpu-strict N | ignored | nothing is drafted
* | --prio-draft --spec-draft-prio N | ignored | nothing is drafted
* | --poll-draft --spec-draft-poll N | ignored | nothing is drafted
* | -Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch M | ignored | nothing is drafted
* | -Crbd --cpu-range-batch-draft --spec-draft-cpu-range-batch R | ignored | nothing is drafted
* | --cpu-strict-batch-draft --spec-draft-cpu-strict-batch N | ignored | nothing is drafted
* | --prio-batch-draft --spec-draft-prio-batch N | ignored | nothing is drafted
* | --poll-batch-draft --spec-draft-poll-batch N | ignored | nothing is drafted
* | -ctkd --cache-type-k-draft --spec-draft-type-k TYPE | ignored | nothing is drafted
* | -ctvd --cache-type-v-draft --spec-draft-type-v TYPE | ignored | nothing is drafted
* | -otd --override-tensor-draft --spec-draft-override-tensor P | ignored | nothing is drafted
* | -cmoed --cpu-moe-draft --spec-draft-cpu-moe | ignored | nothing is drafted
* | -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe N | ignored | nothing is drafted
* | -devd --device-draft --spec-draft-device NAMES | ignored | nothing is drafted
* | -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl N | ignored | nothing is drafted
* | --spec-ngram-mod-n-min N | ignored | nothing is drafted
* | --spec-ngram-mod-n-max N | ignored | nothing is drafted
* | --spec-ngram-mod-n-match N | ignored | nothing is drafted
* | --spec-ngram-simple-size-n N | ignored | nothing is drafted
* | --spec-ngram-simple-size-m N | ignored | nothing is drafted
* | --spec-ngram-simple-min-hits N | ignored | nothing is drafted
* | --spec-ngram-map-k-size-n N | ignored | nothing is drafted
* | --spec-ngram-map-k-size-m N | ignored | nothing is drafted
* | --spec-ngram-map-k-min-hits N | ignored | nothing is drafted
* | --spec-ngram-map-k4v-size-n N | ignored | nothing is drafted
* | --spec-ngram-map-k4v-size-m N | ignored | nothing is drafted
* | --spec-ngram-map-k4v-min-hits N | ignored | nothing is drafted
serve | -lcs --lookup-cache-static FILE | refused | leave it out; the server guesses nothing ahead
serve | -lcd --lookup-cache-dynamic FILE | refused | leave it out; the server guesses nothing ahead

# sampling
chat serve | --temperature X | equals --temp
chat serve | --typical-p X | equals --typical
chat serve | --predict N | equals --n-predict
chat serve | --samplers NAMES | refused | leave it out; the order is llama.cpp's default one
chat serve | --sampler-seq --sampling-seq LETTERS | refused | leave it out; the order is llama.cpp's default one
chat serve | --ignore-eos | refused | "logit_bias" of the end token in a request to latentkv serve
chat serve | --top-nsigma --top-n-sigma X | ignored at -1,-1.0 | --top-p X or --min-p X
chat serve | --xtc-probability X | ignored at 0,0.0 | --top-p X or --min-p X
chat serve | --xtc-threshold X | ignored | without --xtc-probability it does nothing
chat serve | --dry-multiplier X | ignored at 0,0.0 | --repeat-penalty X or --frequency-penalty X
chat serve | --dry-base X | ignored | without --dry-multiplier it does nothing
chat serve | --dry-allowed-length N | ignored | without --dry-multiplier it does nothing
chat serve | --dry-penalty-last-n N | ignored | without --dry-multiplier it does nothing
chat serve | --dry-sequence-breaker TEXT | ignored | without --dry-multiplier it does nothing
chat serve | --adaptive-target X | ignored at -1,-1.0 | --mirostat 2
chat serve | --adaptive-decay X | ignored | without --adaptive-target it does nothing
chat serve | --dynatemp-range X | ignored at 0,0.0 | --temp X
chat serve | --dynatemp-exp X | ignored | without --dynatemp-range it does nothing
chat serve | -l --logit-bias TOKEN+X | refused | "logit_bias" in a request to latentkv serve
chat serve | -bs --backend-sampling | ignored | tokens are sampled on the host

# conversations
chat | --system-prompt TEXT | equals --system
chat | --system-prompt-file FILE | equals --system-file
chat | -cnv --conversation | ignored | without -p, -f or a pipe it is a conversation
chat | -no-cnv --no-conversation | equals --raw
chat | -st --single-turn | ignored | -p, -f or a pipe is answered once
chat | -i --interactive | ignored | without -p, -f or a pipe it is a conversation
chat | -if --interactive-first | ignored | without -p, -f or a pipe it is a conversation
chat | -ins --instruct | ignored | the file's chat template is used
chat | -cml --chatml | ignored | a file without a template is asked in ChatML
chat | -mli --multiline-input | ignored | Alt-Enter adds a line
chat | --in-prefix TEXT | refused | --chat-template-file FILE
chat | --in-suffix TEXT | refused | --chat-template-file FILE
chat | --in-prefix-bos | refused | --chat-template-file FILE
chat | -e --escape | refused | a shell's own escapes: -p $'one\ntwo'
chat | --no-escape | ignored | prompts are taken as they are
chat | -bf --binary-file FILE | refused | -f FILE, a text in UTF-8
chat | -sp --special | refused | leave it out; special tokens are not shown
chat | -ptc --print-token-count N | ignored | a line after each answer says how many tokens it took
chat | --verbose-prompt | ignored | /stats says how many tokens were read
chat | --display-prompt | ignored | the prompt is not said again
chat | --no-display-prompt | ignored | the prompt is not said again
chat | --show-timings | ignored | a line after each answer says them
chat | --no-show-timings | equals --quiet
chat | --simple-io | ignored | a dumb terminal or a pipe has simple input
chat | --server-base URL | refused | leave it out; latentkv chat opens the model itself
chat serve | --jinja | ignored | templates are always read as Jinja
chat serve | --no-jinja | refused | --chat-template-file FILE
chat serve | --chat-template NAME | refused | --chat-template-file FILE
serve | --chat-template-kwargs JSON | refused | "chat_template_kwargs" in a request
chat serve | --skip-chat-parsing | refused | /completion of latentkv serve, which returns plain text
chat serve | --no-skip-chat-parsing | ignored | tool calls are always parsed
chat serve | --reasoning-format FORMAT | ignored at auto,deepseek,deepseek-legacy | leave it out; what a model thinks comes as reasoning_content
serve | -rea --reasoning [auto|on|off] | ignored at auto | "chat_template_kwargs": {"enable_thinking": false} in a request
serve | --reasoning-budget N | ignored at -1 | "chat_template_kwargs": {"enable_thinking": false} in a request
serve | --reasoning-effort LEVEL | refused | "chat_template_kwargs" in a request
chat | -rea --reasoning [auto|on|off] | ignored at auto | --chat-template-kwargs '{"enable_thinking": false}'
chat | --reasoning-budget N | ignored at -1 | --chat-template-kwargs '{"enable_thinking": false}'
chat | --reasoning-effort LEVEL | refused | --chat-template-kwargs '{"reasoning_effort": "low"}'
chat serve | --reasoning-budget-message TEXT | ignored | without --reasoning-budget it does nothing
chat serve | --reasoning-preserve | refused | leave it out; the template decides
chat serve | --no-reasoning-preserve | ignored | the template decides
serve | --prefill-assistant | ignored | a last assistant's message is gone on with
serve | --no-prefill-assistant | refused | end "messages" with a user's message
serve | -sp --special | refused | leave it out; special tokens are not shown
serve | -r --reverse-prompt TEXT | refused | "stop" in a request
serve | --spm-infill | refused | leave it out; in Python, Llama(spm_infill=True)

# the server
serve | -to N | equals --timeout
serve | --tags NAMES | ignored | they are for a router
serve | --path FOLDER | refused | a web server before this one
serve | --no-ui --no-webui | equals --no-page
serve | --ui --webui | ignored | the page is at /
serve | --ui-config --webui-config JSON | ignored | the page keeps its settings in the browser
serve | --ui-config-file --webui-config-file FILE | ignored | the page keeps its settings in the browser
serve | --ui-mcp-proxy --webui-mcp-proxy | refused | leave it out; clients call their tools themselves
serve | --no-ui-mcp-proxy --no-webui-mcp-proxy | ignored | clients call their tools themselves
serve | --tools NAMES | refused | "tools" in a request: clients call them themselves
serve | --tools-runtime OPTION | refused | "tools" in a request: clients call them themselves
serve | --mcp-servers-config FILE | refused | "tools" in a request: clients call them themselves
serve | --mcp-servers-json JSON | refused | "tools" in a request: clients call them themselves
serve | -ag --agent | refused | "tools" in a request: clients call them themselves
serve | -no-ag --no-agent | ignored | clients call their tools themselves
serve | --cors-origins ORIGIN | equals --cors
serve | --cors-methods NAMES | ignored | the methods of its routes are allowed
serve | --cors-headers NAMES | ignored | the headers of its routes are allowed
serve | --cors-credentials | refused | leave it out; --cors ORIGIN lets a page call
serve | --no-cors-credentials | ignored | no credentials are asked for
serve | --api-prefix PREFIX | refused | a web server before this one
serve | --ssl-key-file FILE | refused | a web server before this one
serve | --ssl-cert-file FILE | refused | a web server before this one
serve | --embedding --embeddings | refused | leave it out; this runtime computes logits only
serve | --rerank --reranking | refused | leave it out; this runtime computes logits only
serve | --pooling TYPE | ignored at none | leave it out; this runtime computes logits only
serve | --attention TYPE | ignored at causal | leave it out; this runtime decodes causally
serve | --reuse-port | ignored | a port belongs to one server
serve | --sse-ping-interval N | ignored | a stream that waits is kept open
serve | --threads-http N | ignored | one thread answers all connections
serve | --metrics | ignored | /metrics is always there
serve | --props | ignored | /props is always there, to be read
serve | --slots | ignored | /slots is always there
serve | --no-slots | refused | --api-key KEY, which /slots asks for
serve | --slot-save-path FOLDER | refused | --cache-dir FOLDER: sequences are kept there and found again
serve | -sps --slot-prompt-similarity X | ignored | the longest beginning that is cached is reused
serve | --media-path FOLDER | refused | leave it out; models are run on text alone
serve | --models-dir FOLDER | refused | one latentkv serve for each model
serve | --models-preset FILE | refused | one latentkv serve for each model
serve | --models-max N | refused | one latentkv serve for each model
serve | --models-autoload | refused | one latentkv serve for each model
serve | --no-models-autoload | ignored | a server has one model
serve | --sleep-idle-seconds N | ignored at -1 | leave it out; a server keeps its model
serve | --log-prompts-dir FOLDER | refused | leave it out; prompts are not written anywhere

# what is said
chat perplexity bench info | -v --verbose --log-verbose | ignored | what goes wrong is always said
serve | --log-verbose | equals --verbose
* | -lv --verbosity --log-verbosity N | ignored | what goes wrong is always said
* | --log-disable | ignored | there is no log
* | --log-file FILE | refused | a shell's own redirection: 2> FILE
* | --log-colors [on|off|auto] | ignored | there is no log
* | --log-prefix | ignored | there is no log
* | --no-log-prefix | ignored | there is no log
* | --log-timestamps | ignored | there is no log
* | --no-log-timestamps | ignored | there is no log
serve perplexity | -co --color [on|off|auto] | ignored | lines are plain
chat | -co [on|off|auto] | equals --color

# llama-perplexity
perplexity | -b --batch-size N | ignored | -ub N: tokens that pass through the graph together
perplexity | --kl-divergence | refused | --kld-against f16: both caches run in one process
perplexity | --kl-divergence-base --save-all-logits FILE | refused | --kld-against GGUF[:FORMAT]: both caches run in one process
perplexity | --ppl-stride N | ignored at 0 | --window plain: every token of a window is scored
perplexity | --ppl-output-type N | ignored at 0 | --json
perplexity | --hellaswag | refused | leave it out; texts are scored, not choices
perplexity | --hellaswag-tasks N | refused | leave it out; texts are scored, not choices
perplexity | --winogrande | refused | leave it out; texts are scored, not choices
perplexity | --winogrande-tasks N | refused | leave it out; texts are scored, not choices
perplexity | --multiple-choice | refused | leave it out; texts are scored, not choices
perplexity | --multiple-choice-tasks N | refused | leave it out; texts are scored, not choices
perplexity | -s --seed N | ignored | nothing is drawn

# latentkv info computes nothing
info | -t --threads N | ignored | nothing is computed
info | -tb --threads-batch N | ignored | nothing is computed
info | -b --batch-size N | ignored | nothing is computed

# llama-bench
bench | --n-depth N,… | equals --depth
bench | -pg N,N | refused | -p N -n N -d N: prefill and decode at a depth
bench | -b --batch-size N | ignored | -ub N: tokens that pass through the graph together
bench | -oe --output-err FORMAT | refused | -o FORMAT
bench | -embd --embeddings [0|1] | ignored at 0 | leave it out; this runtime computes logits only
bench | -mmp N | ignored at 1 | --no-mmap to read the weights into memory
bench | --delay N | ignored at 0 | leave it out; caches are measured one after another
bench | --progress | ignored | a bar says how far it is
"""
