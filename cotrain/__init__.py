"""Train one model together over the internet: what a script of your own imports."""


def __getattr__(name: str):
    if name == "Task":
        from cotrain.task import Task  # torch takes seconds

        return Task
    raise AttributeError(f"cotrain has no '{name}'")
