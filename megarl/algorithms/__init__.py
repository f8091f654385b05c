"""Pure tensor functions of policy-gradient training: advantages, losses, KL, importance correction, reward shaping.

Invariants (tests name them):
1. Masked is absent: outputs are exactly 0 off the mask, and NaN or inf there reaches no value, statistic or gradient.
2. Split-invariant: every mean has a denominator counted over the global minibatch, so loss, gradient and metrics do
   not depend on microbatches or data-parallel ranks.
3. Rejection is a mask: a rejected token leaves numerator and denominator, a rejected row leaves its group's baseline.
4. Degenerate input is defined, never an exception and never NaN.
5. Arithmetic is float32 or wider, whatever the input; log-ratios are clamped to +-20 before exp.
"""
