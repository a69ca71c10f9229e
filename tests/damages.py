"""What may happen to the files of a folder: each function makes one that does it to the folder it is given."""

import os

from jax_tformer.files import read_json, write_json


def replace(name, make):
    """Takes a file away; `make` may put something else at its path."""

    def damage(folder):
        path = folder / name
        path.unlink(missing_ok=True)
        make(path)

    return damage


def write(name, content):
    """Puts other content, text or bytes, into a file; takes the file away if that is None."""
    content = content.encode() if isinstance(content, str) else content
    return replace(name, lambda path: content is None or path.write_bytes(content))


def link(name, target="/dev/zero"):
    """Puts a link in the place of a file."""
    return replace(name, lambda path: path.symlink_to(target))


def pipe(name):
    """Puts a pipe in the place of a file."""
    return replace(name, os.mkfifo)


def cut(name, by=9):
    """Takes the last bytes of a file away."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


def swap(name, old, new):
    """Puts other bytes in the place of the first of such in a file."""

    def damage(folder):
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1))

    return damage


def say(name, **values):
    """Changes what the object in a JSON file says; None takes a name out."""

    def damage(folder):
        said = read_json(folder / name) | values
        write_json(folder / name, {key: value for key, value in said.items() if value is not None})

    return damage


def flip_bit(name="."):
    """Changes one bit in the middle of the largest file of a folder within the folder."""

    def damage(folder):
        largest = max((folder / name).rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)

    return damage


def every(*damages):
    """Does all of these."""

    def damage(folder):
        for each in damages:
            each(folder)

    return damage
