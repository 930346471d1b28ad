//! The picture and the batch forms of a made-up host, without a terminal and without servers.

use std::path::PathBuf;
use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::style::Color;
use serde_json::json;
use spile_core::metrics::{Counters, Ended, Op};
use spile_core::{Error, ErrorKind};
use spile_server::serving::api::stats::{DiskStats, LayerKind, LayerStats};
use spile_server::serving::api::types::{Disk, Export};
use spile_server::serving::api::watch::Look;

use super::app::App;
use super::batch;
use super::draw::draw;
use super::keys::{Next, press};
use super::model::{Column, Model, Told};
use super::text::Ink;

const MS: u64 = 1_000_000;
const FULL: Ink = Ink { color: true, unicode: true };
const PLAIN: Ink = Ink { color: false, unicode: false };

/// A disk as an older server may describe it: what has a default is left out.
fn disk(name: &str, state: &str) -> Disk {
    let path = format!("/disks/{name}.raw");
    let said = json!({
        "name": name, "path": path, "format": "raw", "virtual_size_bytes": 1 << 30, "read_only": false, "state": state,
        "server": "/run/spile/a.control", "pid": 7, "exports": [],
    });
    serde_json::from_value(said).unwrap()
}

/// A server's disk over time: each second it reads so many times 4096 bytes, one after the other, each in so many milliseconds at the
/// front, and half of that at the store.
struct Guest {
    disk: Disk,
    front: Counters,
    store: Counters,
    reads: u64,
    latency_ms: u64,
}

impl Guest {
    fn new(name: &str, state: &str, reads: u64, latency_ms: u64) -> Self {
        let [front, store] = [Counters::default(), Counters::default()];
        Self { disk: disk(name, state), front, store, reads, latency_ms }
    }

    fn work(&self, second: u64) {
        for (counters, latency_ns) in [(&self.front, self.latency_ms * MS), (&self.store, self.latency_ms * MS / 2)] {
            for read in 0..self.reads {
                let begun_ns = second * 1000 * MS + read * self.latency_ms * MS;
                counters.begin(Op::Read, 4096, begun_ns);
                counters.end(Ended { op: Op::Read, failed: false, begun_ns }, begun_ns + latency_ns);
            }
        }
    }

    fn stats(&self, second: u64) -> DiskStats {
        let layer = |kind, name: &str, counters: &Counters| {
            LayerStats::new(kind, name.to_owned(), &counters.read(second * 1000 * MS))
        };
        let mut front = layer(LayerKind::Front, "front nbd \"\"", &self.front);
        front.counters = [("notifications_total".to_owned(), self.front.sums(Op::Read).ended)].into();
        let store = layer(LayerKind::Store, &format!("store /disks/{}.raw", self.disk.name), &self.store);
        let Disk { name, path, server, pid, .. } = self.disk.clone();
        DiskStats { name, path, server, pid, layers: vec![front, store], ..DiskStats::default() }
    }
}

fn socket(name: &str) -> PathBuf {
    format!("/run/spile/{name}.control").into()
}

/// One server with these disks, after so many seconds.
fn host(guests: &[Guest], seconds: u64) -> Model {
    let mut model = Model::new();
    for second in 0..=seconds {
        if second > 0 {
            guests.iter().for_each(|guest| guest.work(second - 1));
        }
        let stats = guests.iter().map(|guest| guest.stats(second)).collect();
        let look = Look { disks: guests.iter().map(|guest| guest.disk.clone()).collect(), stats };
        model.hear(Told::Look(socket("a"), Box::new(Ok(look))));
    }
    model
}

fn usual() -> Model {
    let guests = [
        Guest::new("boot", "running", 100, 4),
        Guest::new("data", "waiting", 20, 50),
        Guest::new("idle-disk-of-a-long-name-that-does-not-fit", "running", 0, 0),
    ];
    host(&guests, 3)
}

fn app(model: Model, ink: Ink) -> App {
    App { model, ..App::new(Duration::from_secs(1), ink) }
}

fn picture(app: &App, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(app, frame)).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area.width.max(1));
    let rows = buffer.content.chunks(width).map(|cells| cells.iter().map(|cell| cell.symbol()).collect::<String>());
    rows.map(|row| row.trim_end().to_owned()).collect()
}

fn type_keys(app: &mut App, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\u{1b}' => KeyCode::Esc,
            key => KeyCode::Char(key),
        };
        assert_eq!(press(app, KeyEvent::new(code, KeyModifiers::NONE)), Next::Go, "{key:?}");
    }
}

/// The picture after these keys. `cargo test -- --nocapture` shows it.
fn after(app: &mut App, keys: &str, width: u16, height: u16) -> Vec<String> {
    type_keys(app, keys);
    let lines = lines(&picture(app, width, height));
    println!("{keys:?}\n{}", lines.join("\n"));
    lines
}

#[test]
fn the_list_shows_each_disk_in_a_line() {
    let shown = after(&mut app(usual(), FULL), "", 110, 7);
    let expected = [
        "spile top: 3 disks of 1 server, every 1 s",
        "NAME                            r/sv     w/s   rMB/s   wMB/s   await  aqu-sz store-q     p99   p99.9 TREND",
        "boot                             100    0.00    0.41    0.00 4.00 ms    0.40    0.20 4.00 ms 4.00 ms ███",
        "data                            20.0    0.00    0.08    0.00 50.0 ms    1.00    0.50 49.8 ms 49.8 ms waits",
        "idle-disk-of-a-long-name-th…    0.00    0.00    0.00    0.00       -    0.00    0.00       -       - ▁▁▁",
        "",
        "q end  ? keys  <> sort  r reverse  / filter  l layers  h heat map  Space hold",
    ];
    assert_eq!(shown, expected);
}

#[test]
fn columns_go_where_there_is_no_room_and_nothing_fails_at_any_size() {
    for ink in [FULL, PLAIN] {
        let mut app = app(usual(), ink);
        app.model.hear(Told::Look(socket("b"), Box::new(Err(Error::new(ErrorKind::TimedOut, "it sleeps")))));
        for keys in ["", "l", "h", "?"] {
            type_keys(&mut app, keys);
            for (width, height) in (0..130).flat_map(|width| (0..12).map(move |height| (width, height))) {
                picture(&app, width, height);
            }
        }
    }
    let mut app = app(usual(), FULL);
    assert!(after(&mut app, "", 40, 6)[1].ends_with("r/sv     w/s   await"), "{:?}", after(&mut app, "", 40, 6));
    assert!(after(&mut app, "", 20, 1)[0].starts_with("boot"));
    assert!(!after(&mut app, "", 59, 6)[1].contains("TREND") && after(&mut app, "", 80, 6)[1].contains("TREND"));
}

#[test]
fn a_monochrome_terminal_gets_no_colour_and_a_plain_one_no_strange_character() {
    let colored = |ink: Ink, keys: &str| {
        let mut app = app(usual(), ink);
        type_keys(&mut app, keys);
        let buffer = picture(&app, 100, 20);
        buffer.content.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    for keys in ["", "h", "l"] {
        assert!(colored(FULL, keys), "{keys}");
        assert!(!colored(Ink { color: false, ..FULL }, keys), "{keys}");
        let plain = after(&mut app(usual(), PLAIN), keys, 100, 20);
        assert!(plain.iter().all(|line| line.is_ascii()), "{plain:#?}");
    }
}

#[test]
fn the_order_and_the_filter_are_chosen_by_keys() {
    let mut app = app(usual(), FULL);
    let names = |app: &App| -> String { app.model.shown().iter().map(|(_, row)| &row.disk.name[..1]).collect() };
    assert_eq!((names(&app), app.model.sort), ("bdi".to_owned(), Column::Reads));
    type_keys(&mut app, "r");
    assert_eq!(names(&app), "idb");
    type_keys(&mut app, "<");
    assert_eq!((names(&app), app.model.sort), ("bdi".to_owned(), Column::Name));
    type_keys(&mut app, "<");
    // Where there is no number, a disk comes last in any order.
    assert_eq!((names(&app), app.model.sort), ("bdi".to_owned(), Column::P999));
    type_keys(&mut app, "r");
    assert_eq!(names(&app), "dbi");
    type_keys(&mut app, "/DAT\n");
    assert_eq!((names(&app), app.typing), ("d".to_owned(), false));
    assert!(after(&mut app, "", 100, 6)[0].contains("filter \"DAT\": 1"));
    type_keys(&mut app, "/qqq");
    assert_eq!(names(&app), "");
    assert!(after(&mut app, "", 100, 6).concat().contains("no disk has this text"));
    type_keys(&mut app, "\u{1b}");
    assert_eq!(names(&app), "dbi");
    for (key, next) in [('q', Next::Quit), ('x', Next::Go)] {
        assert_eq!(press(&mut app, KeyEvent::new(KeyCode::Char(key), KeyModifiers::NONE)), next);
    }
    for (key, next) in [('c', Next::Quit), ('z', Next::Suspend)] {
        assert_eq!(press(&mut app, KeyEvent::new(KeyCode::Char(key), KeyModifiers::CONTROL)), next);
    }
}

#[test]
fn the_chosen_disk_has_panels_of_its_own() {
    let mut app = app(usual(), FULL);
    let layers = after(&mut app, "jl", 110, 12);
    assert_eq!(layers[1], "data: /disks/data.raw, process 7");
    assert!(layers[3].starts_with("front nbd \"\"              1.00"), "{layers:#?}");
    assert!(layers[4].starts_with("store data.raw            0.50"), "{layers:#?}");
    assert!(layers[6].contains("notifications 20.0/s"), "{layers:#?}");
    let heat = after(&mut app, "h", 60, 12);
    assert!(heat.iter().any(|line| line.ends_with("-3 s now    █ = 20 requests")), "{heat:#?}");
    let row = heat.iter().find(|line| line.contains("33.6 ms")).unwrap_or_else(|| panic!("{heat:#?}"));
    assert!(row.ends_with("███"), "{heat:#?}");
    assert!(after(&mut app, "?", 100, 22).iter().any(|line| line.contains("heat map of the chosen disk")));
    // A disk that goes while it is looked at is told as such, and the list is there again.
    type_keys(&mut app, "l");
    app.model.hear(Told::Sockets(Vec::new()));
    assert!(after(&mut app, "", 60, 6).concat().contains("the disk \"data\" has gone"));
    assert!(after(&mut app, "\u{1b}", 60, 6).concat().contains("no server on this host has a disk"));
}

#[test]
fn what_is_slow_and_what_is_fast_stand_in_different_rows_of_the_heat_map() {
    let guests = [Guest::new("mixed", "running", 10, 1)];
    let mut model = host(&guests, 2);
    // Slow reads come on top of the fast ones.
    for _ in 0..2 {
        guests[0].front.begin(Op::Read, 4096, 2000 * MS);
        guests[0].front.end(Ended { op: Op::Read, failed: false, begun_ns: 2000 * MS }, 2100 * MS);
    }
    let look = Look { disks: vec![guests[0].disk.clone()], stats: vec![guests[0].stats(3)] };
    model.hear(Told::Look(socket("a"), Box::new(Ok(look))));
    let mut app = app(model, FULL);
    let heat = after(&mut app, "h", 60, 30);
    let marks: Vec<_> = heat.iter().filter(|line| line.contains('█') && !line.contains("now")).collect();
    assert_eq!(marks.len(), 1, "{heat:#?}");
    assert!(heat.iter().any(|line| line.trim_end().ends_with("  ▓") || line.trim_end().ends_with("  ▒")), "{heat:#?}");
    // With few rows, neighbours are one.
    let low = after(&mut app, "", 60, 6);
    assert!(low.len() == 6 && low.concat().contains("now"), "{low:#?}");
}

#[test]
fn servers_that_hang_or_come_back_are_told() {
    let guests = [Guest::new("boot", "running", 100, 4)];
    let mut model = host(&guests, 2);
    let late = || Box::new(Err(Error::new(ErrorKind::TimedOut, "the server does not answer on its control socket")));
    model.hear(Told::Look(socket("a"), late()));
    model.hear(Told::Look(socket("b"), late()));
    let mut app = app(model, FULL);
    let shown = after(&mut app, "", 90, 7);
    assert!(shown[0].ends_with("1 disk of 2 servers, every 1 s  2 without an answer"), "{shown:#?}");
    assert!(shown[2].starts_with("boot     no answer"), "{shown:#?}");
    assert_eq!(shown[4], "/run/spile/b.control: the server does not answer on its control socket");
    // The server answers again: one interval over the whole time.
    guests[0].work(3);
    let look = |pid| {
        let disk = Disk { pid, ..guests[0].disk.clone() };
        Look { disks: vec![disk], stats: vec![DiskStats { pid, ..guests[0].stats(4) }] }
    };
    app.model.hear(Told::Look(socket("a"), Box::new(Ok(look(7)))));
    assert!(after(&mut app, "", 90, 7)[2].contains("50.0"));
    // Another process has taken its place.
    app.model.hear(Told::Look(socket("a"), Box::new(Ok(look(8)))));
    assert!(after(&mut app, "", 90, 7)[2].contains("process 8 serves the disk now"));
    // A socket on which nobody listens is a server that has ended.
    app.model.hear(Told::Look(socket("b"), Box::new(Err(Error::new(ErrorKind::NotFound, "gone")))));
    assert_eq!(app.model.counts(), (1, 1));
}

#[test]
fn each_batch_form_has_its_columns() {
    let xen = Export {
        protocol: "xen".to_owned(),
        address: "backend/vbd3/1/51728".to_owned(),
        name: String::new(),
        tls: String::new(),
    };
    let mut guests = [Guest::new("boot", "running", 100, 4), Guest::new("a disk", "sync_failed", 20, 50)];
    guests[0].disk.exports.push(xen);
    let model = host(&guests, 2);
    let plain = batch::plain(&model).unwrap();
    println!("{plain}");
    let mut rows = plain.lines();
    assert_eq!(rows.next().unwrap().split_whitespace().count(), 11);
    assert!(plain.contains("# a\\u{20}disk: sync failed"), "{plain}");
    let iostat = batch::iostat(&model).unwrap();
    println!("{iostat}");
    let boot = iostat.lines().find(|line| line.starts_with("boot")).unwrap();
    let expected = "boot           100.00      0.39     0.00   0.00    4.00     4.00    0.00";
    assert!(boot.starts_with(expected) && boot.ends_with("   0.40  40.00"), "{boot}");
    assert!(iostat.lines().take(3).map(|line| line.chars().count()).all(|width| width == boot.len()), "{iostat}");
    let mut form = batch::xsiostat();
    let (first, second) = (form(&model).unwrap(), form(&model).unwrap());
    assert_eq!(first.lines().last(), second.lines().last());
    assert!(first.starts_with("-----") && first.contains("\n  DOM   VBD         r/s        w/s    rMB/s"), "{first}");
    assert!(first.contains("\n    1,51728:     100.00       0.00     0.41     0.00   0.40   0.00"), "{first}");
    assert!(first.contains("\n# 0,2: a\\u{20}disk\n    0,    2:      20.00"), "{first}");
    assert!(!second.contains("DOM") && !second.contains("# 0,2") && second.lines().count() == 3, "{second}");
    assert!(second.ends_with("# a\\u{20}disk: sync failed"), "{second}");
    let json: serde_json::Value = serde_json::from_str(&batch::json(&model).unwrap()).unwrap();
    assert_eq!((&json["disks"][0]["name"], &json["disks"][0]["state"]), (&"boot".into(), &"running".into()));
    assert_eq!(json["disks"][0]["layers"][0]["reads_per_s"], 100.0, "{json:#}");
}
