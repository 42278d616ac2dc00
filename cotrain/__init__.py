"""Train one model together over the internet: what a script of your own imports."""


def __getattr__(name: str):
    if name != "Task":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cotrain.task import Task  # a second, which scripts that only parse flags need not wait for

    return Task
