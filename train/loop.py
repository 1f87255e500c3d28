"""The training loop: algorithms 1 and 2 of the paper, one verb a line."""

from __future__ import annotations

from tqdm import tqdm

from train.config import Config
from train.run import Run


def train(config: Config) -> Run:
    """Trains to `config.steps`, from the beginning or from the run's last checkpoint."""
    run = Run(config)
    engine, collector, weigher = run.engine, run.collector, run.weigher
    with run.recorder as recorder:
        if run.fresh:
            scalars = run.pretrain_critic()
            scalars |= run.evaluate(0)
            recorder.scalars(0, scalars)
            run.save(0)
        bar = tqdm(total=config.steps, initial=run.step, desc=config.folder.name, unit="step")
        for step in run.steps():
            batch = collector.next(step)
            lag = step - 1 - batch.version
            if lag != min(run.method.lag, step - 1):
                raise RuntimeError(f"step {step}: rollouts are {lag} updates old")

            values = None
            with run.phases("values"):
                log_probs, entropy = engine.log_probs(batch)
                if run.method.critic:
                    values = engine.values(batch)
            weighed = weigher.weigh(step, batch, values, entropy)

            scalars = {"rollout/lag": float(lag)}
            if values is not None and weighed.returns is not None:
                with run.phases("critic"):
                    scalars |= engine.update_critic(
                        batch, weighed.returns, values, passes=config.critic.passes
                    )
            with run.phases("actor"):
                scalars |= engine.update_actor(batch, weighed.advantages, log_probs)
            with run.phases("sync"):
                run.backend.sync(engine.weights(), version=step)

            collector.observe(batch, weighed.raw, values)
            phase = float(weigher.curriculum.phase == "bottleneck")
            ended = weigher.end_step(batch)
            recorder.charge(batch)
            scalars |= recorder.step(step, batch, weighed, values, log_probs, entropy)
            scalars |= {"curriculum/phase": phase, **collector.sampler.metrics()}
            if ended:
                scalars |= recorder.round(step, ended)
            if run.due(config.evaluation.every, step):
                scalars |= run.evaluate(step)
            recorder.scalars(step, scalars)
            if run.due(config.checkpoints.every, step):
                run.save(step)
            bar.update()
            bar.set_postfix(reward=f"{scalars['reward/mean']:.2f}")
        bar.close()
    return run
