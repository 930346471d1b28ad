//! Names that somebody else may change are used by one module only: `crates/store/src/folder`. Everywhere else a system call with a path is
//! refused, but for the calls below, of which there may be fewer and never more.

use std::path::Path;

use super::Finding;
use super::source::{Source, Word, line_of, words};

/// The module that owns all operations on names.
const OWNER: &str = "crates/store/src/folder/";

/// Crates of the product: what runs on a host beside folders of tenants.
const CRATES: &[&str] = &[
    "core",
    "engine",
    "front",
    "front-blkif",
    "front-nbd",
    "front-vhost",
    "image",
    "life",
    "mem",
    "nbd-tls",
    "node",
    "server",
    "spile",
    "store",
    "xen",
];

/// Functions of `std::fs` and `rustix::fs` that take a path.
const FUNCTIONS: &[&str] = &[
    "access",
    "canonicalize",
    "chmod",
    "chown",
    "copy",
    "create_dir",
    "create_dir_all",
    "exists",
    "hard_link",
    "lchown",
    "link",
    "metadata",
    "mkdir",
    "open",
    "read",
    "read_dir",
    "read_link",
    "read_to_string",
    "readlink",
    "remove_dir",
    "remove_dir_all",
    "remove_file",
    "rename",
    "set_permissions",
    "stat",
    "statfs",
    "statvfs",
    "symlink",
    "symlink_metadata",
    "unlink",
    "write",
];

/// Types whose functions take a path, or begin to.
const OPENERS: &[(&str, &[&str])] =
    &[("File", &["create", "create_new", "open", "options"]), ("OpenOptions", &["new"]), ("DirBuilder", &["new"])];

/// Methods of a path that look at what it names.
const METHODS: &[&str] = &["canonicalize", "exists", "read_dir", "symlink_metadata"];

/// A file that may call the system with paths, how often, and why.
struct Exception {
    file: &'static str,
    most: usize,
    why: &'static str,
}

const fn exception(file: &'static str, most: usize, why: &'static str) -> Exception {
    Exception { file, most, why }
}

const KERNEL: &str = "files of the kernel, below /proc, /sys and /dev";
const OPERATOR: &str = "files that the operator names for this command alone, in no tenant's folder";
const OWN: &str = "the run folder and other folders of Spile's own";
const BEFORE: &str = "calls that are older than this rule: they may become fewer, and no more";

include!("paths_allowed.rs");

/// Refuses calls with paths.
pub fn check(source: &Source) -> Vec<Finding> {
    let path = source.path.to_string_lossy();
    if !is_product(&path) || path.starts_with(OWNER) {
        return Vec::new();
    }
    let calls = calls(source);
    let allowed = ALLOWED.iter().find(|exception| exception.file == path);
    let most = allowed.map_or(0, |exception| exception.most);
    if calls.len() <= most {
        return Vec::new();
    }
    let why = allowed.map_or(String::new(), |exception| format!(" ({most} are allowed here: {})", exception.why));
    let message = format!("{} system calls by path; names are used by descriptor, see {OWNER}{why}", calls.len());
    vec![Finding::new(&source.path, calls[most], message)]
}

/// True for the path of a file of the product, tests left out.
pub fn is_product(path: &str) -> bool {
    let is_test = path.ends_with("/tests.rs") || path.contains("/tests/");
    !is_test && CRATES.iter().any(|name| path.starts_with(&format!("crates/{name}/src/")))
}

/// The lines of all calls outside tests.
fn calls(source: &Source) -> Vec<usize> {
    let code = source.code.split("#[cfg(test)]").next().unwrap_or_default();
    let words = words(code);
    let is_call = |number: &usize| is_path_call(code, &words, *number);
    (0..words.len()).filter(is_call).map(|number| line_of(code, words[number].start)).collect()
}

fn is_path_call(code: &str, words: &[Word<'_>], number: usize) -> bool {
    let word = &words[number];
    let is_named = code[word.end..].trim_start().starts_with('(');
    let joint = number.checked_sub(1).map(|before| code[words[before].end..word.start].trim());
    match joint {
        Some("::") => {
            let owner = words[number - 1].text;
            owner == "fs" && FUNCTIONS.contains(&word.text) && !is_imported(code, word)
                || is_named && OPENERS.iter().any(|(kind, calls)| *kind == owner && calls.contains(&word.text))
        }
        Some(text) if text.ends_with('.') => is_named && METHODS.contains(&word.text),
        _ => false,
    }
}

/// True for a name in a `use` line: it is its calls that count, and they are written with `fs::`.
fn is_imported(code: &str, word: &Word<'_>) -> bool {
    let line = code[..word.start].rfind('\n').map_or(0, |at| at + 1);
    code[line..].trim_start().starts_with("use ")
}

/// Refuses exceptions of files that are not there.
pub fn check_exceptions(root: &Path) -> Vec<Finding> {
    let missing = ALLOWED.iter().filter(|exception| !root.join(exception.file).is_file());
    missing.map(|one| Finding::new(Path::new(one.file), 0, "this file may call by path, and is not there")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        calls(&Source::new(path.into(), text.to_owned()))
    }

    #[test]
    fn calls_by_path_are_found() {
        let text = "fn f() {\n std::fs::read(p);\n File::open(p);\n p.exists();\n rustix::fs::open(p)\n}\n";
        assert_eq!(lines("crates/life/src/x.rs", text), [2, 3, 4, 5]);
        let held = "use std::fs::read;\nfn f() { rustix::fs::openat(&dir, name); file.metadata(); fs::fstat(f) }\n";
        assert_eq!(lines("crates/life/src/x.rs", held), Vec::<usize>::new());
        assert_eq!(lines("crates/life/src/x.rs", "#[cfg(test)]\nfn f() { std::fs::read(p) }"), Vec::<usize>::new());
    }

    #[test]
    fn only_the_product_is_looked_at() {
        let text = "fn f() { std::fs::read(p); }".to_owned();
        for (path, findings) in
            [("crates/node/src/x.rs", 1), ("crates/lab/src/x.rs", 0), ("crates/store/src/folder/x.rs", 0)]
        {
            assert_eq!(check(&Source::new(path.into(), text.clone())).len(), findings, "{path}");
        }
    }
}
