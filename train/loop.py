"""The training loop: algorithms 1 and 2 of the paper, one verb a line."""

from __future__ import annotations

from tqdm import tqdm

from train.config import Config
from train.run import Run


def train(config: Config) -> Run:
    """Trains to `config.steps`, from the beginning or from the run's last checkpoint."""
    with Run(config) as run:
        engine, collector, weigher, recorder = run.engine, run.collector, run.weigher, run.recorder
        if run.fresh:
            scalars = run.pretrain_critic()
            scalars |= run.evaluate(0)
            recorder.scalars(0, scalars)
            run.save(0)
        bar = tqdm(
            total=config.steps,
            initial=run.step,
            desc=config.folder.name,
            unit="step",
            disable=run.world.rank > 0,
        )
        for step in run.steps():
            batch = collector.next(step)
            lag = step - 1 - batch.version
            if lag != min(run.method.lag, step - 1):
                raise RuntimeError(f"step {step}: rollouts are {lag} updates old")

            run.backend.sleep()  # the trainer needs the memory
            values = None
            with run.phases("values"):
                log_probs, entropy = engine.log_probs(batch)
                if run.method.critic:
                    values = engine.values(batch)
                ends = run.ends(batch)
            weighed = weigher.weigh(step, batch, values, entropy, ends)

            kept = run.kept(batch)
            trained = batch.take(kept)
            scalars = {"rollout/lag": float(lag)}
            if values is not None and weighed.returns is not None:
                with run.phases("critic"):
                    scalars |= engine.update_critic(
                        trained, weighed.returns[kept], values[kept], passes=config.critic.passes
                    )
            with run.phases("actor"):
                advantages = run.corrected(weighed.advantages, batch, log_probs)
                scalars |= engine.update_actor(trained, advantages[kept], log_probs[kept])
            run.watch(step, scalars, batch, weighed)
            with run.phases("sync"):
                scalars |= run.sync(step, batch)

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
            stopping = run.stopping()
            if stopping or run.due(config.checkpoints.every, step):
                run.save(step)
            bar.update()
            bar.set_postfix(reward=f"{batch.reward.mean():.2f}")
            if stopping:
                break
        bar.close()
    return run
