//! `cargo xtask tidy`: fails when the tree breaks a rule of the design.
//!
//! Every rule is a pure function from text to findings, so that a test can feed it a sample that
//! breaks it. This module only walks the tree, calls the rules and prints what they found.

pub mod arrows;
mod docs;
mod messages;
mod mods;
mod paths;
mod rules;
mod source;

use crate::{Result, shell};
use source::Source;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// One breach of one rule. `line` counts from 1; 0 means the whole file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    path: PathBuf,
    line: usize,
    message: String,
}

impl Finding {
    fn new(path: &Path, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_path_buf(), line, message: message.into() }
    }
}

/// Runs every rule over the workspace and prints the findings and the sizes.
pub fn run(_arguments: &[String]) -> Result<()> {
    let root = shell::root();
    let metadata = arrows::metadata()?;
    let sources = read_sources(&root)?;
    let mut findings = rust_findings(&sources, &metadata);
    findings.extend(arrows::check(&metadata));
    findings.extend(paths::check_exceptions(&root));
    findings.extend(text_findings(&root)?);
    findings.sort();
    for finding in &findings {
        println!("{}:{}: {}", finding.path.display(), finding.line, finding.message);
    }
    println!("{}", rules::sizes_line(&sources));
    match findings.len() {
        0 => Ok(()),
        count => Err(format!("{count} findings")),
    }
}

/// All rules that look at Rust code.
fn rust_findings(sources: &[Source], metadata: &arrows::Metadata) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources {
        findings.extend(rules::file_length(source));
        findings.extend(rules::allows_unsafe(source));
        findings.extend(rules::left_open(source));
        findings.extend(paths::check(source));
        findings.extend(messages::check(source));
        if metadata.is_crate_root(&source.path) {
            findings.extend(rules::forbids_unsafe(source));
        }
    }
    findings.extend(rules::long_function_share(sources));
    let mut roots = metadata.roots();
    roots.extend(sources.iter().map(|source| source.path.clone()).filter(|path| is_fuzz_target(path)));
    findings.extend(mods::dead_files(sources, &roots));
    findings
}

/// Fuzz targets stand outside the workspace, so cargo does not tell of them; `cargo xtask fuzz`
/// runs every file in their folder.
fn is_fuzz_target(path: &Path) -> bool {
    path.parent() == Some(Path::new("fuzz/fuzz_targets"))
}

/// All rules that look at any text.
fn text_findings(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let names = docs::Names::read(root)?;
    for path in walk(root)? {
        // A file that is not text has no words to check.
        let Ok(text) = std::fs::read_to_string(root.join(&path)) else { continue };
        findings.extend(docs::forbidden_words(&path, &text));
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("md") => findings.extend(docs::markdown(root, &path, &text, &names)),
            Some("rs") | Some("lock") => {}
            _ => findings.extend(docs::left_open(&path, &text)),
        }
    }
    Ok(findings)
}

fn read_sources(root: &Path) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in walk(root)? {
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text =
                std::fs::read_to_string(root.join(&path)).map_err(|error| format!("{}: {error}", path.display()))?;
            sources.push(Source::new(path, text));
        }
    }
    Ok(sources)
}

/// Folders that hold no source of ours, wherever they are.
const SKIPPED_FOLDERS: &[&str] =
    &["target", ".git", "__pycache__", "artifacts", "coverage", "corpus", "tmp", "node_modules"];

/// Every file of the tree, relative to `root`, sorted.
pub fn walk(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let entries =
            std::fs::read_dir(root.join(&folder)).map_err(|error| format!("{}: {error}", folder.display()))?;
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name_text = name.to_string_lossy();
            let path = folder.join(&name);
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => {
                    let skipped = SKIPPED_FOLDERS.contains(&&*name_text);
                    if !skipped && !name_text.starts_with("target-") {
                        folders.push(path);
                    }
                }
                // In a worktree of git's, `.git` is a file.
                Ok(kind) if kind.is_file() && name_text != ".git" => {
                    found.insert(path);
                }
                _ => {}
            }
        }
    }
    Ok(found.into_iter().collect())
}
