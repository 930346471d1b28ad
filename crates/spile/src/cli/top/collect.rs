//! Asks all servers again and again, on a thread of its own.

use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use spile_core::Result;
use spile_server::serving::api::discovery;
use spile_server::serving::api::watch::look_at;

use super::model::Told;
use super::program::Event;
use crate::cli::pace::sleep_until;

/// The first interval of the picture, so that it has numbers soon.
const FIRST: Duration = Duration::from_millis(250);
/// A server that does not answer for so long is told as silent.
const PATIENCE: Duration = Duration::from_secs(2);
const SHORTEST_PATIENCE: Duration = Duration::from_millis(500);

/// How long servers are waited for, when they are asked every `interval`: a silent one does not make intervals longer than they have to be.
pub fn patience(interval: Duration) -> Duration {
    interval.clamp(SHORTEST_PATIENCE, PATIENCE)
}

/// Tells of all servers of `folder` once: first of all sockets, then what each of them says.
///
/// # Errors
/// When the folder cannot be read, or nothing can be asked.
pub fn once(folder: &Path, interval: Duration, mut tell: impl FnMut(Told)) -> Result<()> {
    let sockets = discovery::sockets(folder)?;
    tell(Told::Sockets(sockets.clone()));
    look_at(&sockets, patience(interval), |socket, look| tell(Told::Look(socket, Box::new(look))))
}

/// Tells of all servers in every interval, until nobody hears it.
pub fn again_and_again(folder: &Path, interval: Duration, events: &Sender<Event>) {
    let mut wait = FIRST.min(interval);
    loop {
        let begun = Instant::now();
        // Where nobody hears it, the next event ends this.
        let asked = once(folder, interval, |told| drop(events.send(Event::Told(told))));
        if events.send(Event::Asked(asked)).is_err() {
            return;
        }
        sleep_until(begun, wait);
        wait = interval;
    }
}
