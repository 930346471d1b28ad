//! The shell blocks of the README and of docs/*.md, run in order, as printed.
//!
//! A block that begins with ```` ```sh ```` runs. ```` ```sh needs=PROGRAM ```` runs where that program is installed, and
//! ```` ```sh skip: REASON ```` does not run. All blocks of a file are one script in one empty folder.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// No file's blocks take longer, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(600);

struct Block {
    /// The line that it begins in.
    line: usize,
    /// What stands behind its language.
    terms: String,
    text: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The README and the pages of docs.
fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<_> = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    pages.push(root().join("README.md"));
    pages.sort();
    pages
}

/// The shell blocks of a page. Every block has a fence and a language, so that none is overlooked.
fn shell_blocks(page: &Path) -> Vec<Block> {
    let text = fs::read_to_string(page).unwrap();
    let (mut blocks, mut open, mut above) = (Vec::new(), None::<Block>, "");
    for (number, line) in text.lines().enumerate() {
        let place = format!("{}:{}", page.display(), number + 1);
        match (line.strip_prefix("```"), &mut open) {
            (Some(""), Some(_)) => blocks.extend(open.take()),
            (Some(info), None) => {
                assert!(!info.is_empty(), "{place}: a block without a language");
                open = Some(Block { line: number + 1, terms: info.to_owned(), text: String::new() });
            }
            (_, Some(block)) => writeln!(block.text, "{line}").unwrap(),
            (_, None) => assert!(!line.starts_with("    ") || !above.is_empty(), "{place}: a block without a fence"),
        }
        above = line;
    }
    assert!(open.is_none(), "{}: a block has no end", page.display());
    blocks.retain(|block| block.terms.split_whitespace().next() == Some("sh"));
    blocks
}

fn is_installed(program: &str) -> bool {
    let found = |folder: PathBuf| folder.join(program).is_file();
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(found))
}

/// Why the block does not run here.
fn skipped(block: &Block) -> Option<String> {
    let terms = block.terms.strip_prefix("sh").unwrap_or_default().trim();
    let needs = terms.strip_prefix("needs=");
    match (terms, terms.strip_prefix("skip: ")) {
        ("", _) => None,
        (_, Some(reason)) => Some(reason.to_owned()),
        _ => {
            let program = needs.unwrap_or_else(|| panic!("line {}: `{terms}` is no term of a block", block.line));
            (!is_installed(program)).then(|| format!("{program} is not installed"))
        }
    }
}

/// All blocks of a page that run, as one script that ends at the first command that fails.
fn script(page: &Path) -> String {
    let name = page.file_name().unwrap().display();
    let mut script = "set -euo pipefail\n".to_owned();
    for block in shell_blocks(page) {
        match skipped(&block) {
            Some(reason) => println!("SKIP {name}, block in line {}: {reason}", block.line),
            None => write!(script, "echo '== the block in line {}' >&2\n{}", block.line, block.text).unwrap(),
        }
    }
    script
}

/// Runs the script of `page`; returns whether it succeeded, and what it said.
fn run(page: &Path) -> (bool, String) {
    let dir = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_spile")).parent().unwrap().to_owned();
    let others = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([program].into_iter().chain(std::env::split_paths(&others))).unwrap();
    fs::create_dir(dir.path().join("work")).unwrap();
    let log = fs::File::create(dir.path().join("log")).unwrap();
    let mut command = Command::new("bash");
    command.arg("-c").arg(script(page)).current_dir(dir.path().join("work")).env("PATH", path);
    command.env("SPILE_RUN_DIR", dir.path().join("run")).stdin(Stdio::null());
    command.stdout(log.try_clone().unwrap()).stderr(log).process_group(0);
    let mut child = command.spawn().expect("bash starts");
    let end = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > end => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    // What a failed script has left running ends here.
    let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
    let _ = child.wait();
    let said = fs::read_to_string(dir.path().join("log")).unwrap();
    (status.is_some_and(|status| status.success()), said)
}

#[test]
fn every_shell_block_of_the_readme_and_the_docs_runs_in_order() {
    let mut failed = String::new();
    for page in pages() {
        let (is_ok, said) = run(&page);
        if !is_ok {
            write!(failed, "{}:\n{said}\n", page.display()).unwrap();
        }
    }
    assert!(failed.is_empty(), "{failed}");
}

#[test]
fn the_readme_has_blocks_that_run() {
    let blocks = shell_blocks(&root().join("README.md"));
    let runs = blocks.iter().filter(|block| skipped(block).is_none());
    assert!(runs.count() >= 2);
}
