//! The loop of the program: it sleeps until a key, an answer or a signal comes, and then draws.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use crossterm::event::{self, KeyEvent, KeyEventKind};
use nix::sys::signal::Signal;
use spile_core::{Error, ErrorKind, Result};

use super::app::App;
use super::collect::again_and_again;
use super::draw::draw;
use super::keys::{Next, press};
use super::model::Told;
use super::screen::{Screen, hear_signals};
use super::text::Ink;
use crate::cli::Exit;
use crate::cli::pace::Pace;

/// What the program waits for.
pub enum Event {
    /// A key was pressed.
    Key(KeyEvent),
    /// The terminal has another size.
    Resized,
    /// The terminal can be read no more.
    Unreadable(std::io::Error),
    /// News of servers.
    Told(Told),
    /// All servers were asked.
    Asked(Result<()>),
    /// A signal wants the program to end.
    Ended(Signal),
}

/// Shows all disks until the user ends it, or `pace.count` intervals are over.
///
/// # Errors
/// The terminal's; when the servers cannot be asked.
pub fn run(folder: &Path, pace: &Pace) -> Result<Exit> {
    let (sender, events) = channel();
    hear_signals(sender.clone())?;
    let mut screen = Screen::take()?;
    let (collector, folder, interval) = (sender.clone(), folder.to_owned(), pace.interval);
    std::thread::spawn(move || again_and_again(&folder, interval, &collector));
    std::thread::spawn(move || read_keys(&sender));
    let ink = Ink::of_environment(|name| std::env::var(name).ok());
    watch(&mut screen, &mut App::new(interval, ink), &events, pace.count)
}

/// It ends with the process.
fn read_keys(events: &Sender<Event>) {
    loop {
        let told = match event::read() {
            Ok(event::Event::Key(key)) if key.kind != KeyEventKind::Release => events.send(Event::Key(key)),
            Ok(event::Event::Resize(..)) => events.send(Event::Resized),
            Ok(_) => Ok(()),
            Err(error) => {
                drop(events.send(Event::Unreadable(error)));
                return;
            }
        };
        if told.is_err() {
            return;
        }
    }
}

fn watch(screen: &mut Screen, app: &mut App, events: &Receiver<Event>, count: Option<u64>) -> Result<Exit> {
    let mut intervals = 0;
    loop {
        screen.draw(|frame| draw(app, frame))?;
        let first = events.recv().map_err(|_| Error::new(ErrorKind::Shutdown, "the servers are asked no more"))?;
        // What has come meanwhile is drawn at once.
        for event in std::iter::once(first).chain(events.try_iter()) {
            match event {
                Event::Key(key) => match press(app, key) {
                    Next::Go => {}
                    Next::Quit => return Ok(Exit::Ok),
                    Next::Suspend => screen.suspend()?,
                },
                Event::Resized => {}
                Event::Ended(signal) => return Ok(Exit::Ended(signal)),
                Event::Unreadable(error) => return Err(Error::io("read keys", error)),
                Event::Asked(asked) => {
                    asked?;
                    intervals += 1;
                    // The first look has no interval before it, and the second one a short interval.
                    if count.is_some_and(|count| intervals > count + 1) {
                        return Ok(Exit::Ok);
                    }
                }
                Event::Told(_) if app.paused => {}
                Event::Told(told) => app.model.hear(told),
            }
        }
    }
}
