#!/usr/bin/env bash
# What only a GPU can show, the most wanted first; each part has a limit in seconds, 13 minutes in all.
#
#     pip install -r examples/requirements.txt
#     bash study/on_gpu.sh runs/on_gpu [folder of SmolLM2-135M-Instruct]
#
# It prints as it goes, and leaves its runs in the first folder.
set -u
cd "$(dirname "$0")/.."
out=$1
smollm2=${2:-}
mkdir -p "$out"

part() { # seconds, title, command
    limit=$1
    echo "== $2 ($SECONDS s)"
    shift 2
    timeout "$limit" "$@" 2>&1 | tail -4 || true
}

nvidia-smi --query-gpu=name --format=csv,noheader
python -c "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"

# A capture that fails would be felt first by ppo, which makes its critic after the check at loading.
part 60 "ppo in float32" python ppo.py --iterations 2 --num_held_out 16 --run_dir "$out/ppo"
part 60 "ppo in bfloat16" python ppo.py --iterations 2 --num_held_out 16 --dtype bfloat16 --run_dir "$out/ppo16"

rows="--prompts_per_iteration 32 --group_size 8 --max_new_tokens 256 --num_minibatches 4 --kl_coef 0"
part 90 "sampler, generate(): asked for 5 times" \
    python study/speed.py sampler --model qwen --pairs 5 --flags "$rows --dtype bfloat16"
part 150 "an iteration, TRL's: asked for 0.25" \
    python study/speed.py trl --model qwen --pairs 3 --flags "$rows --dtype bfloat16" \
    --ours "--micro_batch_tokens 32768 --gradient_checkpointing" --theirs "--per_device_train_batch_size 16"
part 60 "memory of README's command: asked for less than 22 GiB" \
    python study/speed.py memory --model qwen --flags "--max_new_tokens 400 --num_minibatches 4 \
    --kl_coef 0 --dtype bfloat16 --gradient_checkpointing"
part 90 "fixed and growing cache, long answers" python -m pytest -n 0 -m slow tests/test_gpu.py -k cache

if [ -n "$smollm2" ]; then
    part 300 "a real model learns sums below 1,000" \
        python grpo.py --model "$smollm2" --dtype bfloat16 --lr 5e-6 --kl_coef 0 --max_new_tokens 64 \
        --num_minibatches 4 --iterations 60 --num_held_out 128 \
        --instruction "Think briefly. End with #### and the number alone, as in #### 42" --run_dir "$out/smollm2"
fi
part 120 "every script learns and resumes" python -m pytest -n 4 -m slow tests/test_gpu.py -k learns
echo "== done ($SECONDS s)"
