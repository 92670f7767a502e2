"""The laboratory's commands, listed as `isthmus_services.settings.listed` lists its own."""

from isthmus_services.settings.command import commands_of

FAMILIES = {"simulate": "simulate training, goodput and bandwidth in virtual time"}

COMMANDS = commands_of(
    "isthmus_lab",
    "isthmus_lab.commands.settings_classes",
    (
        (
            "simulate",
            "Training",
            "train learners with real gradients in virtual time: loss under delays, failures and mixed speeds",
        ),
        ("simulate", "Goodput", "simulate failing chips: data parallel, elastic, and M decoupled learners"),
        (
            "simulate",
            "Bandwidth",
            "compute the Gbit/s that a utilisation needs: data parallel, DiLoCo, Streaming and Decoupled DiLoCo",
        ),
        ("", "Plan", "choose settings for a model and a set of learners, and forecast performance and cost"),
        ("", "Bench", "measure speed and bytes on this machine, and print each figure beside its limit"),
    ),
)
