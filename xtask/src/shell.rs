//! Running programs and finding the places of the workspace.

use crate::Result;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The top folder of the workspace.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or_else(|| here.to_path_buf(), Path::to_path_buf)
}

/// Where cargo builds: `CARGO_TARGET_DIR`, or `target` in the workspace.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The cargo that started this task, else the one on the path.
pub fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// Is `program` on the path?
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// The bytes that are free in the file system of a folder; `None` where nobody can tell.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let told = output(Command::new("df").args(["--output=avail", "--block-size=1"]).arg(folder)).ok()?;
    told.lines().last()?.trim().parse().ok()
}

/// Runs a command with this process's output; an error when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let status = command.status().map_err(|error| format!("cannot run {shown}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{shown}: {status}")) }
}

/// Runs a command and answers with its standard output; errors go to this process's.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let done = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run {shown}: {error}"))?;
    if !done.status.success() {
        return Err(format!("{shown}: {}", done.status));
    }
    String::from_utf8(done.stdout).map_err(|_| format!("{shown}: output is not UTF-8"))
}

/// The value after `--name` in `arguments`, parsed; `default` when it is not there.
pub fn option<T: std::str::FromStr>(arguments: &[String], name: &str, default: T) -> Result<T> {
    let Some(at) = arguments.iter().position(|argument| argument == name) else {
        return Ok(default);
    };
    let value = arguments.get(at + 1).ok_or_else(|| format!("{name} needs a value"))?;
    value.parse().map_err(|_| format!("{name}: cannot read '{value}'"))
}

/// Is the flag `name` among `arguments`?
pub fn flag(arguments: &[String], name: &str) -> bool {
    arguments.iter().any(|argument| argument == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_read_or_defaulted() {
        let arguments = ["--seeds".to_string(), "7".to_string()];
        assert_eq!(option(&arguments, "--seeds", 1), Ok(7));
        assert_eq!(option(&arguments, "--other", 1), Ok(1));
        assert!(option::<u32>(&arguments[..1], "--seeds", 1).is_err());
    }
}
