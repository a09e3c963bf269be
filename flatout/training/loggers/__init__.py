"""Places that receive a run's metrics besides metrics.jsonl: each file is a value of `log.to`.

An entry assigns its class, a `flatout.training.metrics.loggers.Logger`, to `LOGGER`, and the
package that it needs, if any, to `PACKAGE`. The extra of that package has the entry's name.
"""
