"""What the paper claims, by the number under which the studies give their verdicts."""

CLAIMS: dict[int, str] = {
    1: "eq. 13 bounds the gradient, and its Var(V) term governs the size of an update",
    2: "W_S makes correct answers converge and wrong ones explore",
    3: "W_S shifts the distribution of sigma to the right (figure 3)",
    4: "sigma carries information beyond a constant re-weighting of outcomes",
    5: "the tracker follows the drift of difficulty",
    6: "the trigger detects a bottleneck",
    7: "phase 2 moves weight to hard problems",
    8: "each mechanism alone beats VAPO",
    9: "both mechanisms together beat each alone",
    10: "a larger coefficient lifts easy benchmarks, and hard ones peak at .3 (figure 4)",
    11: "the overhead is negligible",
    12: "gains hold at equal device-hours, and for pass@32",
    13: "the lead of the first 100-200 steps comes from the early curriculum",
    14: "lambda_critic = .1 is a working choice",
}
