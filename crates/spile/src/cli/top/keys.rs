//! What keys do.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::app::{App, View};
use super::model::Key;

/// What is to be done after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Go on.
    Go,
    /// End the program.
    Quit,
    /// Give the terminal back to the shell, until the user comes back.
    Suspend,
}

/// The longest filter.
const MAX_FILTER: usize = 60;

/// The keys, for the help.
pub const HELP: &[(&str, &str)] = &[
    ("up, down, k, j", "choose a disk; PgUp, PgDn, Home, End: further"),
    ("<, >", "sort by the column to the left or right"),
    ("r", "reverse the order"),
    ("/", "show only disks with this text in name, path or server; Esc clears it"),
    ("l, Enter", "the layers of the chosen disk: queues and latencies of each"),
    ("h", "heat map of the chosen disk's latencies over time"),
    ("Space", "hold the picture, and let it go on"),
    ("?", "these keys"),
    ("Esc", "back to the list"),
    ("q, Ctrl-C", "end"),
];

/// Does what `key` means.
pub fn press(app: &mut App, key: KeyEvent) -> Next {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Next::Quit,
            KeyCode::Char('z') => Next::Suspend,
            _ => Next::Go,
        };
    }
    if app.typing {
        type_filter(app, key.code);
        return Next::Go;
    }
    match key.code {
        KeyCode::Char('q') => return Next::Quit,
        KeyCode::Char(' ') => app.paused = !app.paused,
        KeyCode::Char('?') => turn(app, |_| View::Help),
        KeyCode::Char('l') | KeyCode::Enter => turn(app, View::Layers),
        KeyCode::Char('h') => turn(app, View::Heat),
        KeyCode::Esc if app.view == View::List => app.model.filter.clear(),
        KeyCode::Esc => show(app, View::List),
        code if app.view == View::List => in_list(app, code),
        code => in_panel(app, code),
    }
    Next::Go
}

fn show(app: &mut App, view: View) {
    app.view = view;
    app.scroll = 0;
}

/// Shows a panel of the chosen disk, or the list where that panel is shown already.
fn turn(app: &mut App, panel: impl FnOnce(Key) -> View) {
    app.choose(0);
    let panel = panel(app.chosen.clone().unwrap_or_default());
    let view = if app.view == panel { View::List } else { panel };
    show(app, view);
}

fn in_list(app: &mut App, code: KeyCode) {
    match code {
        KeyCode::Up | KeyCode::Char('k') => app.choose(-1),
        KeyCode::Down | KeyCode::Char('j') => app.choose(1),
        KeyCode::PageUp => app.choose(-10),
        KeyCode::PageDown => app.choose(10),
        KeyCode::Home => app.choose(isize::MIN / 2),
        KeyCode::End => app.choose(isize::MAX / 2),
        KeyCode::Left | KeyCode::Char('<') => app.model.sort = app.model.sort.next(-1),
        KeyCode::Right | KeyCode::Char('>') => app.model.sort = app.model.sort.next(1),
        KeyCode::Char('r') => app.model.descending = !app.model.descending,
        KeyCode::Char('/') => app.typing = true,
        _ => {}
    }
}

fn in_panel(app: &mut App, code: KeyCode) {
    match code {
        KeyCode::Up | KeyCode::Char('k') => app.scroll = app.scroll.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => app.scroll = app.scroll.saturating_add(1),
        _ => {}
    }
}

fn type_filter(app: &mut App, code: KeyCode) {
    let filter = &mut app.model.filter;
    match code {
        KeyCode::Char(character) if filter.chars().count() < MAX_FILTER => filter.push(character),
        KeyCode::Backspace => drop(filter.pop()),
        KeyCode::Enter => app.typing = false,
        KeyCode::Esc => {
            filter.clear();
            app.typing = false;
        }
        _ => {}
    }
}
