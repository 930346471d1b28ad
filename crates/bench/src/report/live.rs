//! `spile report --live`: a page of one running server.
//!
//! The page asks this process for its figures, and this process asks the server for what it has counted, at most once in [`REST`]. When
//! nobody looks, nothing is asked. Only this host can connect, and only under a name of this host: a page from
//! elsewhere whose name is made to lead here (DNS rebinding) is refused by its `Host`. Other users of this host do not know the
//! random token in the page's address, without which every request is refused: the server's control socket is not for all of them.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use spile_core::metrics::{OpReading, bounds_of};
use spile_core::{Env as _, Error, Result};
use spile_engine::OsEnv;
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::rates::{Interval, LayerInterval, LayerRates};
use spile_server::serving::api::stats::{AllStats, DiskStats, LayerKind};
use spile_server::units::format_us;

use super::page;
use crate::experiments::plot::{Axis, Figure, Heat, Marks, Panel, Point, Series, escape, styles};

/// The shortest time between two looks at the server.
const REST: Duration = Duration::from_millis(900);
/// A longer interval is not shown: nobody has looked in it, for example because the page was hidden.
const LONGEST: Duration = Duration::from_secs(3);
/// The kinds of layers that are shown, the guest's side first.
const KINDS: [LayerKind; 4] = [LayerKind::Front, LayerKind::Disk, LayerKind::Image, LayerKind::Store];
/// Intervals that are shown.
const KEPT: usize = 60;
/// Columns of the heat map: the last of these intervals.
const COLUMNS: usize = 20;
/// What may be in the page: nothing from elsewhere.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'";

/// Asks for the figures every second while the page is seen, and keeps what the reader has opened and where the focus is.
const SCRIPT: &str = "<script>
const main = document.getElementById('main'), state = document.getElementById('state');
async function look() {
  if (document.hidden) return;
  try {
    const answer = await fetch('figures');
    if (!answer.ok) throw new Error(answer.status);
    const html = await answer.text();
    const open = [...main.querySelectorAll('figure:has(details[open])')].map(one => one.id);
    const focus = document.activeElement && document.activeElement.id;
    main.innerHTML = html;
    open.forEach(id => document.querySelector('#' + CSS.escape(id) + ' details')?.setAttribute('open', ''));
    if (focus) document.getElementById(focus)?.focus({preventScroll: true});
    state.textContent = '';
  } catch {
    state.textContent = 'spile report does not answer: the figures stand still.';
  }
}
look();
setInterval(look, 1000);
</script>
";

/// What one disk did in an interval.
struct Moment {
    at: Instant,
    /// The layers of each kind, the guest's side first.
    layers: Vec<(LayerKind, LayerRates)>,
    /// Requests at the front by the power of two of their latency in µs, from 1 µs on.
    latencies: [u64; 24],
}

/// One disk.
#[derive(Default)]
struct Watched {
    last: Option<DiskStats>,
    moments: VecDeque<Moment>,
}

/// What is known of the server's disks.
#[derive(Default)]
struct Watch {
    disks: BTreeMap<String, Watched>,
    trouble: Option<String>,
    /// When the server was asked last.
    asked: Option<Instant>,
    /// The server has been asked, and has not answered yet.
    is_asking: bool,
}

/// What the page's address and its answers are made of.
struct Site {
    socket: PathBuf,
    port: u16,
    /// The first part of every path. Only those who have read the printed address know it.
    token: String,
    watch: Mutex<Watch>,
}

/// A page that is served.
pub struct Live {
    listener: TcpListener,
    site: Site,
}

impl Live {
    /// Listens on this host for the page of the server with the control socket `socket`; port 0 takes any that is free.
    ///
    /// # Errors
    /// When the server does not answer, or the port is taken.
    pub fn new(socket: &Path, port: u16) -> Result<Self> {
        let mut watch = Watch::default();
        watch.take(Ok(stats(socket)?));
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|e| Error::io("listen on 127.0.0.1", e))?;
        let port = listener.local_addr().map_err(|e| Error::io("listen on 127.0.0.1", e))?.port();
        let token = format!("{:032x}", u128::from_be_bytes(OsEnv.random_16()));
        Ok(Self { listener, site: Site { socket: socket.to_owned(), port, token, watch: Mutex::new(watch) } })
    }

    /// Where the page is. Whoever knows this address can read it.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.site.port, self.site.token)
    }

    /// Answers until the process ends.
    ///
    /// # Errors
    /// When the runtime cannot be started.
    pub fn run(self) -> Result<()> {
        let failed = |source| Error::io("serve the page", source);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        self.listener.set_nonblocking(true).map_err(failed)?;
        let router = router(Arc::new(self.site));
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(self.listener).map_err(failed)?;
            axum::serve(listener, router).await.map_err(failed)
        })
    }
}

fn router(site: Arc<Site>) -> Router {
    let figures = async |State(site): State<Arc<Site>>| {
        // A call waits for the server: not on the thread that answers others.
        let html = tokio::task::spawn_blocking(move || site.figures());
        html.await.map(Html).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
    };
    Router::new()
        .route("/{token}/", get(async |State(site): State<Arc<Site>>| Html(site.page())))
        .route("/{token}/figures", get(figures))
        .layer(from_fn_with_state(site.clone(), only_who_may))
        .with_state(site)
}

/// Refuses a request that names another host or does not know the token, and has answers used by nobody else.
async fn only_who_may(State(site): State<Arc<Site>>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let refused = |why: &'static str| (StatusCode::FORBIDDEN, why).into_response();
    let mut answer = match () {
        _ if !is_this_host(host, site.port) => refused("this page is read under 127.0.0.1 or localhost\n"),
        _ if !has_token(request.uri().path(), &site.token) => {
            refused("read the address that spile report has printed\n")
        }
        _ => next.run(request).await,
    };
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, header::HeaderValue::from_static(POLICY));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    headers.insert(header::REFERRER_POLICY, header::HeaderValue::from_static("no-referrer"));
    answer
}

fn is_this_host(host: &str, port: u16) -> bool {
    ["127.0.0.1", "localhost"].iter().any(|name| host == format!("{name}:{port}"))
}

/// True when the first part of the path is the token. The time that it takes does not tell how much of it is right.
fn has_token(path: &str, token: &str) -> bool {
    let part = path.strip_prefix('/').and_then(|rest| rest.split('/').next()).unwrap_or_default();
    let differing = part.bytes().zip(token.bytes()).fold(0, |differing, (a, b)| differing | (a ^ b));
    part.len() == token.len() && differing == 0
}

/// Asks a server for what it has counted of all its disks.
fn stats(socket: &Path) -> Result<Vec<DiskStats>> {
    ask::<AllStats>(socket, "GET", "/v1/stats", LOOK_PATIENCE).map(|stats| stats.disks)
}

impl Site {
    fn page(&self) -> String {
        let title = format!("Spile: {}", self.socket.display());
        let header = format!("<h1>{}</h1><p id=\"state\" role=\"status\" class=\"muted\"></p>", escape(&title));
        page::document(&title, &header, "<p>The first interval takes a second.</p>", SCRIPT)
    }

    /// The figures, after a look at the server if the last one is not just now and nobody else waits for one. Nothing is locked while
    /// the server is asked: whoever comes meanwhile gets the figures as they are.
    fn figures(&self) -> String {
        if self.watch().begins_to_ask() {
            let answer = stats(&self.socket);
            self.watch().take(answer);
        }
        self.watch().html()
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    /// True when it is time for another look; then the caller asks the server, and gives the answer to [`Self::take`].
    fn begins_to_ask(&mut self) -> bool {
        let is_due = !self.is_asking && self.asked.is_none_or(|asked| asked.elapsed() >= REST);
        if is_due {
            (self.is_asking, self.asked) = (true, Some(Instant::now()));
        }
        is_due
    }

    fn take(&mut self, answer: Result<Vec<DiskStats>>) {
        self.is_asking = false;
        match answer {
            Ok(stats) => {
                self.trouble = None;
                self.disks.retain(|name, _| stats.iter().any(|disk| disk.name == *name));
                stats.into_iter().for_each(|disk| self.disks.entry(disk.name.clone()).or_default().add(disk));
            }
            Err(error) => self.trouble = Some(error.to_string()),
        }
    }

    fn html(&self) -> String {
        let trouble: String = self.trouble.iter().map(|why| format!("<p class=\"mark\">{}</p>", escape(why))).collect();
        let disk = |(number, (name, watched)): (usize, (&String, &Watched))| {
            let figures = watched.figures();
            let figures =
                figures.iter().map(|(what, one)| page::figure(what, one, &format!("d{number}-{what}"), KEPT * 8));
            format!("<section><h2>{}</h2>{}</section>", escape(name), figures.collect::<String>())
        };
        let none = if self.disks.is_empty() { "<p>The server has no disks.</p>" } else { "" };
        format!("{trouble}{none}{}", self.disks.iter().enumerate().map(disk).collect::<String>())
    }
}

impl Watched {
    fn add(&mut self, now: DiskStats) {
        let interval = self.last.as_ref().and_then(|last| Interval::between(last, &now).ok());
        // A successor's counts begin at zero; its first interval is the next one.
        self.last = Some(now);
        let is_short =
            |interval: &Interval| interval.layers.iter().all(|layer| layer.elapsed_ns <= LONGEST.as_nanos() as u64);
        let Some(interval) = interval.filter(is_short) else { return };
        let layers = KINDS.into_iter().filter_map(|kind| Some((kind, of_kind(&interval, kind)?.rates()))).collect();
        let front = interval.all_of(LayerKind::Front).map(|front| front.reading.total());
        let latencies = front.map_or([0; 24], |total| by_power(&total));
        self.moments.push_back(Moment { at: Instant::now(), layers, latencies });
        while self.moments.len() > KEPT {
            self.moments.pop_front();
        }
    }

    /// Four figures: what is moved, how many wait where, how long it takes, and how that is spread.
    fn figures(&self) -> Vec<(&'static str, Figure)> {
        let of_disk = |value: fn(&LayerRates) -> Option<f64>| self.line(LayerKind::Disk, value);
        let moved = vec![
            self.panel(
                "requests per second",
                &[("read", of_disk(|disk| Some(disk.reads_per_s))), ("write", of_disk(|disk| Some(disk.writes_per_s)))],
            ),
            self.panel(
                "MB/s (10^6 bytes)",
                &[
                    ("read", of_disk(|disk| Some(disk.read_bytes_per_s / 1e6))),
                    ("write", of_disk(|disk| Some(disk.write_bytes_per_s / 1e6))),
                ],
            ),
        ];
        let queues: Vec<_> =
            KINDS.iter().map(|kind| (kind.name(), self.line(*kind, |layer| layer.queue_size_avg))).collect();
        let of_front = |value: fn(&LayerRates) -> Option<f64>| self.line(LayerKind::Front, value);
        let latency =
            [("p50", of_front(|front| front.latency_p50_us)), ("p99", of_front(|front| front.latency_p99_us))];
        let waits = vec![
            self.panel("average queue size", &queues),
            self.panel("latency at the front in µs, as the guest sees it", &latency),
        ];
        vec![
            ("moved", figure("What the guest moves", moved)),
            ("waits", figure("How many requests wait at each layer, and how long they take", waits)),
            ("latencies", figure("How latencies are spread", vec![self.heat()])),
        ]
    }

    /// A value of one layer, by seconds before now.
    fn line(&self, kind: LayerKind, value: impl Fn(&LayerRates) -> Option<f64>) -> Vec<Point> {
        let now = self.moments.back().map(|last| last.at);
        let point = |moment: &Moment| {
            let layer = moment.layers.iter().find(|(other, _)| *other == kind)?;
            let ago = now?.duration_since(moment.at).as_secs_f64();
            Some(Point::new(-ago, value(&layer.1)?))
        };
        self.moments.iter().filter_map(point).collect()
    }

    fn panel(&self, unit: &str, lines: &[(&str, Vec<Point>)]) -> Panel {
        let most = lines.iter().flat_map(|(_, points)| points).map(|point| point.y).fold(0.0, f64::max);
        let looks = styles(lines.iter().map(|(name, _)| *name));
        let series = lines.iter().zip(looks).map(|((name, points), style)| Series {
            name: (*name).to_owned(),
            style,
            points: points.clone(),
        });
        let x = Axis::between("seconds before now", -(KEPT as f64), 0.0);
        let marks = Marks::Series { x, y: Axis::linear(unit, most), series: series.collect(), reference: None };
        Panel { title: String::new(), marks }
    }

    /// Requests of each interval by their latency.
    fn heat(&self) -> Panel {
        let shown: Vec<&Moment> = self.moments.iter().rev().take(COLUMNS).rev().collect();
        let rows = || 0..24;
        let came = |row: usize| shown.iter().any(|moment| moment.latencies[row] > 0);
        let (low, high) = (rows().find(|row| came(*row)).unwrap_or(0), rows().rfind(|row| came(*row)).unwrap_or(0));
        let value = |row: usize, moment: &&Moment| (moment.latencies[row] > 0).then_some(moment.latencies[row] as f64);
        let heat = Heat {
            x: "intervals before now".to_owned(),
            columns: (0..shown.len()).rev().map(|ago| ago.to_string()).collect(),
            y: "latency at the front, from".to_owned(),
            rows: (low..=high).map(|row| format_us((1u64 << row) as f64)).collect(),
            value: "requests".to_owned(),
            values: (low..=high).map(|row| shown.iter().map(|moment| value(row, moment)).collect()).collect(),
        };
        Panel { title: String::new(), marks: Marks::Heat(heat) }
    }
}

/// The layers of a kind as one. Of the images it is the leaf alone: its requests are whole ones, and their time in the parents is in them.
fn of_kind(interval: &Interval, kind: LayerKind) -> Option<LayerInterval> {
    match kind {
        LayerKind::Image => interval.layers.iter().find(|layer| layer.kind == kind).cloned(),
        _ => interval.all_of(kind),
    }
}

fn figure(title: &str, panels: Vec<Panel>) -> Figure {
    let note = "each point is an interval of about a second".to_owned();
    Figure { title: title.to_owned(), note, panels, columns: 2, ..Figure::default() }
}

fn by_power(total: &OpReading) -> [u64; 24] {
    let mut powers = [0; 24];
    for (bucket, count) in total.latency.counts.iter().enumerate() {
        let us = (bounds_of(bucket).start / 1000).max(1);
        powers[(us.ilog2() as usize).min(23)] += count;
    }
    powers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_host_are_answered() {
        assert!(is_this_host("127.0.0.1:80", 80) && is_this_host("localhost:80", 80));
        for other in ["", "127.0.0.1", "127.0.0.1:81", "evil.example:80", "127.0.0.1.evil.example:80", "localhost:80.x"]
        {
            assert!(!is_this_host(other, 80), "{other}");
        }
    }

    #[test]
    fn only_who_knows_the_token_is_answered() {
        let token = "0123456789abcdef";
        assert!(has_token("/0123456789abcdef/", token) && has_token("/0123456789abcdef/figures", token));
        for other in
            ["", "/", "/figures", "/0123456789abcde/", "/0123456789abcdee/", "/0123456789abcdef0/", "0123456789abcdef/"]
        {
            assert!(!has_token(other, token), "{other}");
        }
    }

    /// What a disk with two images has counted up to `at_s`: `reads` of one second each, all of which pass to the parent.
    fn counted(at_s: u64, reads: u64) -> DiskStats {
        let read = serde_json::json!({
            "operation": "read", "begun": reads, "requests": reads, "errors": 0, "abandoned": 0, "bytes": reads << 12, "in_flight": 0,
            "latency_sum_ns": reads * 1_000_000_000, "latency_max_ns": 1_000_000_000, "latency_buckets": []
        });
        let layer = |kind: &str, name: &str| {
            serde_json::json!({
                "kind": kind, "name": name, "made_ns": 1, "at_ns": at_s * 1_000_000_000, "queue_time_ns": reads * 1_000_000_000, "age_sum_ns": 0,
                "connections": 0, "operations": [read], "counters": {}, "queues": []
            })
        };
        let layers = [layer("disk", "disk"), layer("image", "image leaf"), layer("image", "image parent")];
        let disk = serde_json::json!({ "name": "d", "path": "leaf", "server": "s", "pid": 1, "layers": layers });
        serde_json::from_value(disk).unwrap()
    }

    #[test]
    fn requests_that_pass_to_a_parent_count_once() {
        let mut watched = Watched::default();
        watched.add(counted(10, 4));
        watched.add(counted(11, 6));
        let layers = &watched.moments[0].layers;
        let queue = |kind: LayerKind| layers.iter().find(|(other, _)| *other == kind).unwrap().1.queue_size_avg;
        assert_eq!((queue(LayerKind::Disk), queue(LayerKind::Image)), (Some(2.0), Some(2.0)));
    }

    #[test]
    fn an_interval_in_which_nobody_looked_is_not_shown() {
        let mut watched = Watched::default();
        [10, 11, 71, 72].into_iter().for_each(|at_s| watched.add(counted(at_s, at_s)));
        assert_eq!(watched.moments.len(), 2);
    }

    #[test]
    fn a_server_that_hangs_makes_nobody_else_wait() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("c");
        let server = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let site = Arc::new(Site { socket, port: 1, token: "t".to_owned(), watch: Mutex::default() });
        let first = std::thread::spawn({
            let site = site.clone();
            move || site.figures()
        });
        // The server has been asked, and says nothing.
        let asked = server.accept().unwrap();
        assert!(site.figures().contains("no disks") && !first.is_finished());
        drop((asked, server));
        assert!(first.join().unwrap().contains("class=\"mark\""), "the trouble is told");
    }

    #[test]
    fn latencies_are_counted_by_their_power_of_two() {
        let mut total = OpReading::default();
        total.latency.counts = vec![0; spile_core::metrics::BUCKETS];
        for us in [0, 1, 3, 1000] {
            total.latency.counts[spile_core::metrics::bucket_of(us * 1000)] += 1;
        }
        let powers = by_power(&total);
        assert_eq!((powers[0], powers[1], powers[9], powers.iter().sum::<u64>()), (2, 1, 1, 4));
    }

    #[test]
    fn figures_of_an_empty_disk_are_well() {
        for (name, figure) in Watched::default().figures() {
            assert_eq!(figure.faults(), Vec::<String>::new(), "{name}");
        }
    }
}
