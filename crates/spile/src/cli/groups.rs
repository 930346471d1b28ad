//! The commands that `spile --help` lists, in groups.

use std::fmt::Write as _;

use clap::Command;

/// Each group with its commands, in the order in which help lists them.
const GROUPS: &[(&str, &[&str])] = &[
    ("Disks", &["create", "info", "map", "check", "convert", "compare", "measure", "resize", "amend"]),
    (
        "Serving",
        &["serve", "attach", "detach", "limit", "shape", "on-error", "pause", "resume", "accept-loss", "xen-backend"],
    ),
    ("Watching", &["ls", "show", "stat", "top", "slow", "trace", "events"]),
    (
        "Life of a disk",
        &[
            "snapshot",
            "clone",
            "revert",
            "coalesce",
            "flatten",
            "rebase",
            "delete",
            "gc",
            "tree",
            "checkpoint",
            "changed",
            "internal-snapshot",
        ],
    ),
    ("Moving and backup", &["move", "receive", "backup", "verify", "restore", "jobs", "job"]),
    ("Tools", &["demo", "load", "bench", "report", "tune", "xen-lab", "schema", "completions", "man", "help"]),
];

/// `command` with a help that lists its commands in groups. Lines have `columns` characters at most.
pub fn grouped(command: Command, columns: usize) -> Command {
    let list = list(&command, columns);
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"
    ))
}

fn list(command: &Command, columns: usize) -> String {
    let mut text = String::new();
    let names = GROUPS.iter().flat_map(|(_, names)| *names);
    let indent = names.map(|name| name.len()).max().unwrap_or(0) + 4;
    for (title, names) in GROUPS {
        let _ = writeln!(text, "{title}:");
        for name in *names {
            let words = about(command, name);
            let lines = wrapped(&words, columns - indent);
            for (number, line) in lines.iter().enumerate() {
                let name = if number == 0 { *name } else { "" };
                let _ = writeln!(text, "  {name:<width$}{line}", width = indent - 2);
            }
        }
        text.push('\n');
    }
    text
}

/// The first line of the help of the command `name`, and its other names.
fn about(command: &Command, name: &str) -> String {
    let Some(inner) = command.find_subcommand(name) else {
        // Clap adds this one when it reads a command line.
        return "Print this, or the help of a command".to_owned();
    };
    let about = inner.get_about().map(ToString::to_string).unwrap_or_default();
    let aliases: Vec<&str> = inner.get_visible_aliases().collect();
    if aliases.is_empty() { about } else { format!("{about} (also: {})", aliases.join(", ")) }
}

fn wrapped(words: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words.split_whitespace() {
        let last = lines.last_mut().expect("there is one");
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > columns {
            lines.push(word.to_owned());
        } else {
            last.push_str(if last.is_empty() { "" } else { " " });
            last.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::help;
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let command = help::command();
        let shown = command.get_subcommands().filter(|inner| !inner.is_hide_set());
        let mut all: Vec<&str> = shown.map(Command::get_name).chain(["help"]).collect();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        all.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, all);
    }

    #[test]
    fn the_list_fits_a_terminal() {
        let text = help::command().render_help().to_string();
        assert!(text.contains("\nServing:\n  serve ") && text.contains("\nOptions:\n"), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
