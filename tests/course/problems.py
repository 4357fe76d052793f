"""Course: the homework as a table: what is left out, and what is said in its place.

`exercise.py` makes the handout and the grader from it. A problem's hints are ordered steps; its
tests are those of the house whose names match `tests`.
"""

from dataclasses import dataclass

SCRIPTS = ("grpo", "dapo", "gspo", "ppo")


@dataclass(frozen=True)
class Problem:
    """One thing to write: `functions` of `module`.py."""

    module: str
    functions: tuple
    points: int
    minutes: int
    hints: str
    tests: str  # a regular expression, searched in the names of tests/test_<module>.py
    given: tuple = ()  # marked functions of the same file that this one may call: put in, correct
    file: str = ""  # tests/test_<file>.py, if not <module>

    @property
    def name(self):
        return f"{self.module}.{self.functions[0].lstrip('_')}"


ADVANTAGES = """
1. Refuse what cannot be compared: a group of one, or rows that do not fill the last group.
2. View the N rewards as (N / G, G): the rows of one question are consecutive.
3. Subtract each group's own mean (keepdim), not the batch's.
4. Divide by the group's standard deviation plus eps. Divide by G - 1 in it, and mind where eps
   stands: outside the root.
5. In a group of equal rewards the rounding of the mean over eps is not small: find such groups
   (largest equals smallest) and put exactly 0 there.
"""
WEIGHTS_ANSWERS = """
1. The mask may be of integers or bools: make it floating point, but keep a float's own dtype.
2. `total` is the number of answers of the whole step. Not given: the rows here.
3. A token of answer i counts 1/|o_i|, an answer 1/total. Mind the answer without any token.
4. Padding counts 0. The shape is the mask's.
"""
WEIGHTS_TOKENS = """
1. The mask may be of integers or bools: make it floating point, but keep a float's own dtype.
2. `total` is the number of response tokens of the whole step. Not given: those of the rows here.
3. Every response token counts the same, padding 0. Mind a batch without any token.
"""
ANSWER_WEIGHTS = """
4. answer_weights: an answer counts 1/total, each of its tokens an equal share of that.
"""
CLIPPED = """
1. Log-ratio of new to old policy. What lies under mask 0 may be NaN, and 0 x NaN is NaN, in the
   gradient too: replace it (masked_fill) *before* the exponential.
2. The ratio.{ratio}
3. Two losses (minus the objective): advantage times ratio, and advantage times the ratio held
   within {limits}. {shape}
4. Keep the worse of the two for each token. Is that a max or a min, now that it is a loss?
5. The loss is the *sum* of weights times that: the weights hold every mean already.
6. Statistics carry no graph (detach): `pg_loss`; `clip_frac`, the weight of those whose clipped
   loss is the larger; `approx_kl`, k3 of old || new from the token's log-ratio (expm1),
   weighted.{kl}
"""
KL = """
7. With `ref_logp`: kl_k3 of the two policies, both masked first, weighted as the rest and so inside
   the mean; add beta times it to the loss and note the sum without beta as `ref_kl`."""

BY_TOKEN = dict(ratio=" One per token.", limits="1 - clip_eps and 1 + clip_eps",
                shape="An advantage (N,) needs a new axis to meet (N, T).")


def _group_methods(script, weights, policy, also=()):
    """The problems that a script of groups has: advantages, weights, loss."""
    return [
        Problem(script, ("group_advantages",), 10, 25, ADVANTAGES, "group_advantages"),
        Problem(script, ("token_weights", *also), 5, 15, weights, "token_weights"),
        policy,
    ]


PROBLEMS = [
    *_group_methods("grpo", WEIGHTS_ANSWERS, Problem(
        "grpo", ("policy_loss",), 15, 45, CLIPPED.format(**BY_TOKEN, kl=KL), "policy_loss",
        given=("kl_k3",))),
    Problem("grpo", ("kl_k3",), 5, 15, """
1. d is log pi_ref - log pi_theta: the sample came from pi_theta, so which of the two is on top?
2. k3 is e^d - d - 1. Near d = 0 this takes the difference of two numbers near 1: torch.expm1
   keeps the digits.
""", "kl_k3"),
    *_group_methods("dapo", WEIGHTS_TOKENS + ANSWER_WEIGHTS, Problem(
        "dapo", ("policy_loss",), 10, 30, CLIPPED.format(
            **BY_TOKEN | dict(limits="1 - clip_low and 1 + clip_high"), kl=""), "policy_loss"),
        also=("answer_weights",)),  # GRPO's weights: given, they would be the answer to its problem
    Problem("dapo", ("soft_overlong_penalty",), 10, 20, """
1. Refuse a buffer that is not within 1 ... max_len (ValueError).
2. The last length that costs nothing is max_len - buffer_len; each further token costs
   1 / buffer_len.
3. At max_len it is -1 and never less; for short answers it is 0 and never a bonus: clamp.
4. Lengths may be integers; the result is floating point.
""", "soft_overlong_penalty"),
    Problem("dapo", ("keep_group",), 5, 10, """
1. Count the right answers of each group, a row of (P, G).
2. A group teaches if that is neither none nor all. Count: a computed std of equal numbers need
   not be 0, and rewards with a penalty differ in groups that are all wrong.
""", "keep_group"),
    *_group_methods("gspo", WEIGHTS_ANSWERS, Problem(
        "gspo", ("policy_loss",), 15, 40, CLIPPED.format(
            ratio=" One per *answer*: e to the mean over its tokens of the log-ratio, the\n"
                  "   mean over |o_i| and not over the padded width. Average the logs first: the "
                  "product\n   of 4,000 ratios overflows. Shape (N, 1), so that it meets (N, T).",
            limits="1 - clip_low and 1 + clip_high",
            shape="An advantage (N,) becomes (N, 1).", kl=""), "policy_loss")),
    Problem("ppo", ("token_rewards",), 10, 25, """
1. -kl_coef (logp - ref_logp) on every response token; replace what lies under mask 0 (it may be
   NaN), do not multiply it away.
2. Find the last response token of each row from the mask's row sums. It is not the last column.
3. Add the score there, on top of that token's KL. A row without tokens gets none: index -1 is
   not "none".
4. Do not change the inputs in place.
""", "token_rewards"),
    Problem("ppo", ("gae",), 15, 45, """
1. Replace rewards and values under mask 0 by 0: V after the last token is 0.
2. Walk t from the last column to the first, all rows at once, with two (N,) tensors at hand: V_t+1
   and A_t+1, both 0 at the start.
3. delta_t = R_t + gamma V_t+1 - V_t.
4. A_t = delta_t + gamma lam A_t+1, and 0 where t is padding, so that nothing leaks into an answer
   from beyond its end.
5. Returns are A + V: the critic's target, taken before any whitening, 0 in the padding.
6. Do not change the inputs in place.
""", "test_gae"),
    Problem("ppo", ("whiten",), 5, 20, """
1. Take the unmasked cells alone: padding belongs neither to the mean nor to the variance nor to
   the count.
2. Fewer than two cells have no spread: all 0.
3. Unbiased variance; 1e-8 under the root.
4. All rows together, not each by itself; 0 (not minus the mean, not NaN) in the padding.
""", "test_whiten"),
    Problem("ppo", ("token_weights",), 5, 15, WEIGHTS_TOKENS, "token_weights"),
    Problem("ppo", ("policy_loss",), 10, 30, CLIPPED.format(
        **BY_TOKEN | dict(shape="Advantages are (N, T), and may be garbage under mask 0, too."),
        kl=""), "policy_loss"),
    Problem("ppo", ("value_loss",), 10, 30, """
1. Replace all three under mask 0 before any arithmetic.
2. The new value held within old value -+ clip_eps (around the old one, not around 0).
3. Two squared errors against the returns, free and held; keep the larger for each token.
4. Half the weighted sum. Where both errors agree (before the first update) torch.maximum gives
   each half of the gradient, so both must carry theirs for it to be whole.
5. `value_loss`, and `value_clip_frac` (weight of the tokens whose held error is the larger),
   without a graph.
""", "value_loss"),
    Problem("common", ("response_mask",), 5, 20, """
1. Where is a stop token? (torch.isin; several ids may stop.)
2. A running count of stops along the row: a token is part of the answer if no stop came *before*
   it. The first stop token itself counts: that is how stopping is learned.
3. Never ask about pad: in many models pad is the end token.
""", "response_mask"),
    Problem("common", ("head_logps", "positions"), 10, 30, """
head_logps(head, hidden (n, d), targets (n,), temperature, entropy) -> (logp (n,), entropy (n,)):
1. Logits from the head, in float32 or wider (bfloat16 is off by 0.045 nat), over temperature.
2. logp: the log-softmax at the target. F.cross_entropy is minus that.
3. entropy "off": None. "grad": minus the sum of p log p. "value": the same without a gradient.
positions: 0 on the first real token, then 1, 2, ...; padding on the left must not shift them, and
no position is negative.
""", "test_token_logps_(by_hand|peers)|test_log_probs_are|test_positions"),
    Problem("rewards", ("extract_answer", "_last_box"), 10, 40, """
extract_answer:
1. Cut the text where NEXT_QUESTION first matches: a model likes to go on asking itself.
2. With a `####`: what follows the *last* one, to the end of that line. Without: `_last_box`.
3. Lenient, and nothing found: the last match of LAST_NUMBER, less a trailing . , or /
4. Stripped; None if nothing is left.
_last_box: the contents of the last \\boxed{...} whose braces balance, or "". Walk once over
   the text (re.split at braces), with a stack of what was opened; \\{ and \\} are no braces.
""", "test_(strict|lenient)_reading"),
]

# --- the later algorithms, each an exercise ------------------------------------------------------


def variant(name):
    """A variant of variants/ as a problem: all the functions that make it, in its own script."""
    import variants

    told = variants.read(name).header
    hints = [f"- {told['Idea']}", f"- {told['Equation']}", f"- {told['Why']}",
             f"- {told['Setting']}", f"- {told['Here']}", f"- {told['Paper']}"]
    tests = (rf"^Test_{name}::|^test_{name}_(?!refuses)|^test_\w+_the_peers\[{name}-"
             rf"|^test_tied_groups\S+[\[-]{name}[\]-]|^test_groups_of_one\S+\[{name}\]")
    if name == "reinforce_pp_baseline":
        tests += "|^test_k2_has"
    return Problem(name, tuple(variants.changed_functions(name)), 10, 30, "\n".join(hints), tests,
                   file="variants")


# --- the five stages of `train` ------------------------------------------------------------------

SAMPLE = """
- The next P questions: run.next_questions(data.train).
- Answers to them: rollout(...), with seed=(cfg.seed, run.step), so that any step can be replayed.
"""
SCORE = """
- score(batch) gives rewards and verdicts, (N,) each: keep both on the batch.
- The clock: log.lap("t_sample"), the seconds of stages 1 and 2.
"""
GROUPS = """
- One number per answer, from group_advantages.
"""
LOG = """
- A step is done: count it (run.advance).
- Every cfg.eval_every steps (run.due) experiment.evaluate on data.heldout, else {}.
- log.add(run.step, batch, ...): {log}
- Every cfg.save_every steps run.save(sampler).
"""
UPDATE = """
- Cut the batch once (common.cut, by cfg.minibatches and cfg.micro_tokens): old{ref} and new
  log-probs share it.
- old_logp of the whole batch (common.whole_logps), before anything moves. With a single update per
  rollout it is logp.detach() of the update itself and needs no pass.{more}
- log.lap("t_logp"), a common.Meter().
- For each minibatch, cfg.epochs times over, an optimizer step:
    for each of its micros: common.micro_logps; for samples.jsonl
    log.note(minibatch, micro, logp=..., old_logp=..., entropy=...);
    token_weights with the *minibatch's* total ({total}); policy_loss of its rows (micro.take);
    backward of loss times common.world() (FSDP averages over ranks, we want the sum);
    meter.add(**stats, entropy=its weighted sum); meter.gap(sampler's and old log-probs).
    Then the learning rate, lr (linear over cfg.lr_warmup optimizer steps; run.updates counts the
    past ones), common.optimizer_step, meter.step(grad_norm=..., lr=...), one more run.updates.
- sampler.refresh(), log.lap("t_update").
"""
LOG_GROUPS = "advantages, meter, the evaluation, tied_frac=the share of groups\n" \
    "  whose advantages are all 0"
STAGE_NAMES = {  # what goes from one stage to a later one
    "grpo": "`batch`, `advantages`, `meter`", "gspo": "`batch`, `advantages`, `meter`",
    "dapo": "`batch`, `everything` (all that was sampled), `rounds`, `dropped`, `advantages`, "
            "`meter`",
    "ppo": "`batch`, `minibatches`, `old_logp`, `ref_logp`, `old_values`, `kl`, `rewards`, "
           "`advantages`, `returns`, `meter`"}
STAGES = {  # script -> number of the ruled stage -> hints
    "grpo": {1: SAMPLE, 2: SCORE, 3: GROUPS, 4: UPDATE.format(
        ref=", reference", total="its number of rows", more="""
- ref_logp likewise, if there is a reference; policy_loss takes it and cfg.beta."""),
        5: LOG.replace("{log}", LOG_GROUPS)},
    "gspo": {1: SAMPLE, 2: SCORE, 3: GROUPS, 4: UPDATE.format(
        ref="", total="its number of rows", more=""), 5: LOG.replace("{log}", LOG_GROUPS)},
    "dapo": {1: """
- Rounds, at most cfg.max_gen_rounds, until the groups kept hold P * G answers. Each round:
    the next P questions, rollout with seed (cfg.seed, run.step, round), score (as GRPO's);
    shaped_rewards with the weight that score.weights has for "correct" (0 if none), the longest
    length cfg.max_new_tokens, and cfg.overlong_buffer;
    keep mixed_groups(batch), all of it if not cfg.dynamic_sampling;
    remember all that was sampled and, apart, what was kept.
- Join each list with common.Batch.cat (sampler.pad): `everything` and `batch`. `dropped`: groups
  that were filtered out, before the cut; train on the first P * G answers (select). There may be
  fewer, or none: then stage 4 has no minibatch. `rounds` is a number.
- log.lap("t_sample").
""", 3: GROUPS, 4: UPDATE.format(ref="", total="its tokens", more="""
- Without cfg.token_mean the weights are answer_weights, with the minibatch's rows as total."""),
        5: LOG.replace("{log}", LOG_GROUPS.replace(
            "the evaluation,", "the evaluation, all that was sampled,")
            + ",\n  gen_rounds=the rounds, groups_dropped=the groups dropped")},
    "ppo": {1: SAMPLE, 2: SCORE, 3: """
- Cut the batch once (common.cut, by cfg.minibatches and cfg.micro_tokens): all log-probs and
  values share it.
- old_logp, ref_logp (old_logp itself without a reference) and old_values, (N, T) each, with
  common.whole_logps and common.whole(micro_values, ...).
- `kl`, a float: the mean over answers of the mean over tokens of old_logp - ref_logp.
- The scores; with cfg.bootstrap a truncated answer also earns gamma times the value after its last
  token (common.whole(micro_values, ...) with after=True).
- token_rewards, gae, then whiten the advantages (not the returns). log.lap("t_logp").
""", 4: """
- A common.Meter(). For each minibatch, cfg.epochs times over, a step of both optimizers:
    for each of its micros: common.micro_logps (entropy "grad" if cfg.entropy_coef, else "value");
    token_weights with the minibatch's tokens as total; policy_loss of the micro's rows;
    less cfg.entropy_coef times the weighted entropy; backward of loss times common.world();
    micro_values, value_loss with cfg.value_clip, backward likewise;
    meter.add(**stats, value_loss=..., entropy=...); meter.gap(sampler's, old log-probs, mask).
    Then common.optimizer_step for policy and critic, both learning rates warmed up over
    cfg.lr_warmup steps; meter.step(grad_norm=..., lr=...); one more run.updates.
- sampler.refresh(), log.lap("t_update").
""", 5: LOG.replace("{log}", """answer_means of the advantages, meter, the evaluation,
  ref_kl (None without a reference), kl_coef, explained_var.
- With cfg.kl_target the weight adapts: kl_coef grows by min(max(kl / target - 1, -0.2), 0.2)
  times answers / cfg.kl_horizon; keep it in run.kept["kl_coef"], too.""")},
}

LOOP_POINTS = {  # stage -> points, and the columns of metrics.csv that show it
    "1 sample": (10, "samples tokens response_len truncated_frac gen_rounds groups_dropped"),
    "2 score": (5, "reward accuracy"),
    "3 advantage": (10, "tied_frac explained_var"),
    "4 update": (20, "pg_loss value_loss entropy ref_kl approx_kl clip_frac grad_norm lr"),
    "5 log, evaluate, save": (5, "step eval_accuracy eval_sampled kl_coef sampler_gap"),
}

# --- the last item: the script learns ------------------------------------------------------------

LEARN_POINTS = 15  # 5 for each of three seeds
LEARN_SECONDS = 60  # of CPU time for a run
LEARN = {  # script -> steps, sampled accuracy on 256 held-out questions that must be reached:
    # about midway between the start (0.24) and what samples of the training questions reach in
    # step 10 (seeds 0, 1: GRPO, DAPO, PPO 0.70 or more, GSPO 0.59)
    "grpo": (10, 0.45), "dapo": (10, 0.45), "gspo": (10, 0.40), "ppo": (10, 0.45),
}
