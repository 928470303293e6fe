"""Debian packages whose prose is trained on: where it lies in the package, in which form, and its licence."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One package: files matching any of `globs` (relative to the unpacked package), at most `limit` bytes of text."""

    package: str
    licence: str
    globs: tuple[str, ...]
    kind: str = "html"
    limit: int = 4_000_000


def _doc(package: str, licence: str, *subpaths: str, limit: int = 4_000_000, kind: str = "html") -> Source:
    return Source(package, licence, tuple(f"usr/share/doc/{path}" for path in subpaths), kind, limit)


SOURCES = (
    _doc("python3.11-doc", "PSF-2.0", "python3.11/html/*.html", "python3.11/html/[!w]*/*.html", limit=5_000_000),
    _doc("postgresql-doc-15", "PostgreSQL", "postgresql-doc-15/html/*.html", limit=5_000_000),
    _doc(
        "rust-doc",
        "MIT OR Apache-2.0",
        *(f"rust-doc/html/{book}/**/*.html" for book in ("book", "reference", "cargo", "nomicon", "edition-guide")),
        *(f"rust-doc/html/{book}/**/*.html" for book in ("rustc", "rustdoc", "embedded-book", "rust-by-example")),
        *(f"rust-doc/html/std/{module}/*.html" for module in ("*", "collections/*", "sync/*")),
    ),
    _doc("debian-handbook", "GPL-2.0-or-later OR CC-BY-SA-3.0", "debian-handbook/html/en-US/*.html"),
    _doc("harden-doc", "GPL-2.0", "harden-doc/html/en-US/*.html"),
    _doc("debian-policy", "GPL-2.0-or-later", "debian-policy/**/*.html"),
    Source("developers-reference", "GPL-2.0-or-later", ("usr/share/developers-reference/*.html",)),
    _doc("maint-guide", "GPL-2.0-or-later", "maint-guide/html/*.html"),
    Source("debian-reference-en", "GPL-2.0-or-later", ("usr/share/debian-reference/*.en.html",)),
    _doc("debian-faq", "GPL-2.0-or-later", "debian/FAQ/*.html", "debian-faq/**/*.html"),
    _doc("debian-kernel-handbook", "GPL-2.0-or-later", "debian-kernel-handbook/**/*.html"),
    _doc("debian-history", "GPL-2.0-or-later", "debian-history/**/*.en.html"),
    _doc("installation-guide-amd64", "GPL-2.0-or-later", "installation-guide-amd64/en/*.html"),
    _doc("aptitude-doc-en", "GPL-2.0-or-later", "aptitude/html/en/*.html"),
    _doc("live-manual-txt", "GPL-3.0-or-later", "live-manual/txt/live-manual.en.txt*", kind="text"),
    _doc("git-doc", "GPL-2.0", "git-doc/**/*.html"),
    _doc(
        "linux-doc-6.1",
        "GPL-2.0",
        *(
            f"linux-doc-6.1/html/{part}/**/*.html"
            for part in (
                "process",
                "admin-guide",
                "core-api",
                "filesystems",
                "doc-guide",
                "maintainer",
                "scheduler",
                "mm",
                "RCU",
                "locking",
                "security",
                "networking",
                "trace",
                "dev-tools",
                "timers",
                "virt",
                "block",
                "power",
            )
        ),
        limit=5_000_000,
    ),
    _doc("sqlite3-doc", "public domain", "sqlite3/*.html", "sqlite3/c3ref/*.html", limit=4_000_000),
    _doc("apache2-doc", "Apache-2.0", "apache2-doc/manual/en/**/*.html"),
    _doc("python-django-doc", "BSD-3-Clause", "python-django-doc/html/**/*.html"),
    _doc("exim4-doc-html", "GPL-2.0-or-later", "exim4-doc-html/**/*.html"),
    _doc("zsh-doc", "MIT-like (zsh licence)", "zsh*/**/*.html"),
    _doc("bash-doc", "GFDL-1.3 (no invariant sections)", "bash/*.html", "bash-doc/*.html"),
    _doc("vim-doc", "Vim", "vim/html/usr_*.html", "vim/html/*.html", kind="vim", limit=3_000_000),
    _doc(
        "lilypond-doc-html",
        "GFDL-1.3 (no invariant sections)",
        *(
            f"lilypond/html/Documentation/{part}/*.html"
            for part in ("learning", "notation", "usage", "music-glossary", "essay", "contributor", "extending")
        ),
    ),
    _doc("octave-doc", "GPL-3.0-or-later", "octave/octave.html/*.html", "octave-doc/**/*.html"),
    _doc("maxima-doc", "GPL-2.0-or-later", "maxima-doc/**/*.html", "maxima/**/*.html", limit=2_000_000),
    _doc("gnuplot-doc", "gnuplot licence", "gnuplot*/**/*.html", limit=1_000_000),
    _doc("r-doc-html", "GPL-2.0-or-later", "R/manual/**/*.html", "r-doc-html/**/*.html"),
    _doc("mit-scheme-doc", "GFDL-1.2 (no invariant sections)", "mit-scheme-doc/**/*.html", limit=2_000_000),
    Source("swi-prolog-doc", "BSD-2-Clause", ("usr/share/swi-prolog/doc/**/*.html",), limit=2_000_000),
    Source("gimp-help-en", "GFDL-1.2 (no invariant sections)", ("usr/share/gimp/2.0/help/en/*.html",)),
    Source("libreoffice-help-en-us", "MPL-2.0", ("usr/share/libreoffice/help/en-US/text/**/*.html",), limit=3_000_000),
    Source("perl-doc", "GPL-1.0-or-later OR Artistic-1.0", ("usr/share/perl/*/pod/*.pod",), "pod"),
    _doc("anarchism", "GPL-2.0-or-later", "anarchism/html/*.html", limit=6_000_000),
    _doc("abs-guide", "public domain", "abs-guide/html/*.html"),
    _doc("jargon-text", "public domain", "jargon-text/*.gz", kind="text"),
    Source("dict-devil", "public domain", ("usr/share/dictd/*.dz",), "dictionary"),
    Source("dict-foldoc", "GFDL-1.2 (no invariant sections)", ("usr/share/dictd/*.dz",), "dictionary", 5_000_000),
    Source(
        "r-cran-janeaustenr",
        "public domain",
        ("usr/lib/R/site-library/janeaustenr/data/*.rdb",),
        "r-strings",
        6_000_000,
    ),
)
