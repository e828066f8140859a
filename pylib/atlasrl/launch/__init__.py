"""Where jobs run, on which addresses and ports. Only this package knows submitit."""
