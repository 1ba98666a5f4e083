"""Several programs at once, of which one is at work at a time: who goes on is drawn, and time is told, not passed."""

import threading


class Together:
    """Runs functions in threads that hand the turn on at every `step`; equal seeds give equal interleavings."""

    def __init__(self, chance):
        self.now = 0.0
        self._chance = chance
        self._wake = {}
        self._go = {}
        self._stepped = threading.Semaphore(0)
        self._of = threading.local()

    def step(self, seconds=0.0):
        """Called by a program: others may go on, and it does so itself after this time at the earliest."""
        name = self.name
        self._wake[name] = self.now + seconds
        self._stepped.release()
        self._go[name].acquire()

    @property
    def name(self):
        """Of the program that is at work."""
        return self._of.name

    def run(self, programs):
        """Runs the programs to their ends; what each of them returned, or the exception that it raised."""
        results = {}

        def body(name, program):
            self._of.name = name
            self._go[name].acquire()
            try:
                results[name] = program()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                results[name] = error
            del self._wake[name]
            self._stepped.release()

        self._go = {name: threading.Semaphore(0) for name in programs}
        self._wake = dict.fromkeys(programs, self.now)
        threads = [threading.Thread(target=body, args=each, daemon=True) for each in programs.items()]
        for thread in threads:
            thread.start()
        while self._wake:
            self.now = max(self.now, min(self._wake.values()))
            self._go[self._chance.choice([name for name, at in self._wake.items() if at <= self.now])].release()
            self._stepped.acquire()
        for thread in threads:
            thread.join()
        return results
