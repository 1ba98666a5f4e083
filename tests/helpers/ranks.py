"""A function on several processes that form a world, started for it alone."""

from helpers.pool import JOB_SECONDS, Pool


def on(size, function, *arguments, environments=None, seconds=JOB_SECONDS):
    """`function(world, *arguments)` on each of `size` processes; what they return, or the line of the error.

    `environments`: what each finds in its environment before it meets the others.
    Function and arguments are pickled: what a test has patched in its own process is not patched there.
    """
    pool = Pool(size, environments)
    try:
        answers = pool.run(function, *arguments, seconds=seconds)
    finally:
        pool.close()
    for answer in answers:
        assert answer.kind in ("done", "refused"), "\n".join(str(each.value or each.kind) for each in answers)
    return [answer.value for answer in answers]
