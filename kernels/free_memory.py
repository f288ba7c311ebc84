"""Whether there is room for one more copy of a matrix, in another form that is read faster."""

from pathlib import Path

LEFT_SHARE = 0.5  # of the machine's memory that copies leave free


def leaves_room(num_bytes: int) -> bool:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(kilobytes) * 1024 for name, kilobytes, *_ in lines}
    return sizes["MemAvailable:"] - num_bytes > LEFT_SHARE * sizes["MemTotal:"]
