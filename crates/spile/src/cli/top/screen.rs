//! The terminal: drawn on as a whole, and as it was before when the program ends, panics, is ended by a signal or suspended.

use std::io::{IsTerminal, Stdout, stdin, stdout};
use std::sync::mpsc::Sender;

use crossterm::cursor::{Hide, Show};
use crossterm::execute;
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use nix::sys::signal::{SigSet, Signal, raise};
use ratatui::backend::CrosstermBackend;
use ratatui::{Frame, Terminal};
use spile_core::{Error, Result};

use super::program::Event;
use crate::signals::exit_code;

/// The signals that end the program.
const ENDS: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];

/// The exit code after a panic, as Rust's own.
const PANICKED: i32 = 101;

/// True when there is a terminal to draw on and to read keys from.
pub fn is_terminal() -> bool {
    let is_dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
    stdin().is_terminal() && stdout().is_terminal() && !is_dumb
}

/// A terminal that belongs to this program until this is dropped.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal. From now on a panic of any thread gives it back, is told, and ends the program.
    ///
    /// # Errors
    /// The terminal's.
    pub fn take() -> Result<Self> {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            tell(panic);
            std::process::exit(PANICKED);
        }));
        enter().map(|terminal| Self { terminal })
    }

    /// Draws a picture. The terminal's size is looked up each time.
    ///
    /// # Errors
    /// The terminal's.
    pub fn draw(&mut self, picture: impl FnOnce(&mut Frame<'_>)) -> Result<()> {
        self.terminal.draw(picture).map(drop).map_err(|e| Error::io("draw on the terminal", e))
    }

    /// Gives the terminal to the shell, sleeps until the user comes back, and takes it again.
    ///
    /// # Errors
    /// The terminal's; the system's.
    pub fn suspend(&mut self) -> Result<()> {
        give_back();
        raise(Signal::SIGSTOP).map_err(|e| Error::io("stop this process", e.into()))?;
        self.terminal = enter()?;
        Ok(())
    }
}

/// A terminal that is drawn on as a whole, and sends each key at once; or the terminal as it was, when something fails. It has the keys'
/// reader beside it, so nothing here may ask it a question.
fn enter() -> Result<Terminal<CrosstermBackend<Stdout>>> {
    let steps = || {
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        Terminal::new(CrosstermBackend::new(stdout()))
    };
    steps().inspect_err(|_| give_back()).map_err(|e| Error::io("take the terminal", e))
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// What fails here cannot be helped: the terminal may have gone.
fn give_back() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

/// From now on a signal that ends the program is an event; the second one ends it at once. To be called before other threads are started.
///
/// # Errors
/// The system's.
pub fn hear_signals(events: Sender<Event>) -> Result<()> {
    let signals: SigSet = ENDS.into_iter().collect();
    signals.thread_block().map_err(|e| Error::io("block signals", e.into()))?;
    std::thread::spawn(move || {
        let Ok(first) = signals.wait() else { return };
        drop(events.send(Event::Ended(first)));
        if let Ok(second) = signals.wait() {
            give_back();
            std::process::exit(exit_code(second));
        }
    });
    Ok(())
}
