//! What the program prints as JSON is what `spile schema` says, and nothing beside it.

use std::path::Path;

use crate::common::control::ask;
use crate::common::guests::{nbd, serve};
use crate::common::json_schema::mistakes;
use crate::common::nbd::Client;
use crate::common::{fails, json, ok, run};
use serde_json::{Value, json as json_of};

/// The schema of that name.
fn schema(dir: &Path, name: &str) -> Value {
    let words: Vec<&str> = ["schema"].into_iter().chain(name.split(' ')).collect();
    let schema: Value = serde_json::from_str(&ok(dir, &words)).unwrap();
    assert!(name == "api" || schema["$schema"] == "https://json-schema.org/draft/2020-12/schema", "{name}");
    schema
}

/// The value is as the schema says, and the schema can refuse: a key more or, as some key must be there, none at all.
fn assert_fits(schema: &Value, value: &Value, what: &str) {
    assert_fits_answer(schema, value, what);
    assert!(!mistakes(schema, &json_of!({})).is_empty(), "{what}: nothing has to be there");
}

/// Runs a command with --json, whatever its exit code, and looks at what it prints.
fn assert_prints(dir: &Path, name: &str, args: &[&str]) -> Value {
    let value = assert_prints_any(dir, name, args);
    assert_fits(&schema(dir, name), &value, name);
    value
}

/// As [`assert_prints`]; there may be no key that must be there.
fn assert_prints_any(dir: &Path, name: &str, args: &[&str]) -> Value {
    let words: Vec<&str> = name.split(' ').chain(args.iter().copied()).chain(["--json"]).collect();
    let output = run(dir, &words);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{words:?}: {error}: {said}"));
    assert_fits_answer(&schema(dir, name), &value, &format!("{words:?}"));
    value
}

#[test]
fn commands_on_images_print_what_their_schemas_say() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert_prints(dir, "create", &["p.vhd", "--size", "16M"]);
    assert_prints(dir, "create", &["c.vhd", "--parent", "p.vhd"]);
    std::fs::write(dir.join("a.raw"), [5; 1 << 20]).unwrap();
    assert_prints(dir, "convert", &["a.raw", "b.vhd"]);
    for disk in ["a.raw", "b.vhd", "c.vhd"] {
        assert_prints(dir, "info", &[disk, "--chain"]);
        assert_prints(dir, "map", &[disk]);
        assert_prints(dir, "check", &[disk]);
        assert_prints(dir, "measure", &[disk, "--to", "vhd"]);
    }
    assert_prints(dir, "snapshot", &["b.vhd", "--name", "kept.vhd"]);
    assert!(assert_prints(dir, "delete", &["kept.vhd"])["child_path"].is_string());
    assert!(assert_prints(dir, "delete", &["kept.vhd", "--undo"])["is_kept"] == true);
    assert_prints(dir, "delete", &["kept.vhd"]);
    assert_prints(dir, "tree", &["."]);
    assert_prints(dir, "gc", &[".", "--dry-run"]);
    assert_prints(dir, "gc", &["."]);
    assert_prints(dir, "compare", &["a.raw", "b.vhd"]);
    assert!(assert_prints(dir, "compare", &["a.raw", "c.vhd"])["differs_at_offset_bytes"] == 0);
    // With findings of more than one kind.
    let bytes = std::fs::read(dir.join("b.vhd")).unwrap();
    std::fs::write(dir.join("cut.vhd"), &bytes[..bytes.len() - 4096]).unwrap();
    let checked = assert_prints(dir, "check", &["cut.vhd"]);
    assert!(!checked["findings"].as_array().unwrap().is_empty(), "{checked}");
    if crate::common::have("qemu-img", "commands_on_images_print_what_their_schemas_say") {
        let mut make = std::process::Command::new("qemu-img");
        let made = make.args(["create", "-qf", "qcow2", "q.qcow2", "1M"]).current_dir(dir).status();
        assert!(made.unwrap().success());
        assert_prints(dir, "info", &["q.qcow2"]);
    }
}

#[test]
fn errors_are_json_as_their_schema_says() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let schema = schema(dir, "error");
    let cases: [(&[&str], i32); 15] = [
        (&["info", "gone.raw"], 1),
        (&["map", "gone.raw"], 1),
        (&["check", "gone.raw"], 1),
        (&["create", "a.raw"], 2),
        (&["convert", "gone.raw", "a.vhd"], 1),
        (&["compare", "gone.raw", "gone.raw"], 2),
        (&["measure", "gone.raw", "--to", "vhd"], 1),
        (&["measure", "--to", "vhd"], 2),
        (&["ls", "gone"], 1),
        (&["show", "gone"], 1),
        (&["stat", "gone"], 1),
        (&["load", "nbd+unix:///?socket=gone"], 1),
        (&["bench", "crowd", "--disks", "x"], 2),
        (&["demo", "--dir", "/proc/gone"], 1),
        (&["info"], 2),
    ];
    for (args, code) in cases {
        let said = fails(dir, code, &[args, &["--json"]].concat());
        let error = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{args:?}: {error}: {said}"));
        assert_fits(&schema, &error, &format!("{args:?}"));
    }
}

/// The schema of a call's answer, or of its body, in the document of the API.
fn schema_at(document: &Value, path: &str, method: &str, rest: &[&str]) -> Value {
    let call = &document["paths"][path][method.to_lowercase()];
    let part = rest.iter().fold(call, |part, key| &part[*key]);
    let content = &part["content"]["application/json"]["schema"];
    assert!(content.is_object(), "{method} {path} {rest:?}: {call:#}");
    let mut schema = content.clone();
    schema["components"] = document["components"].clone();
    schema
}

#[test]
fn a_server_answers_what_its_document_says() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a.vhd", "b.raw"] {
        ok(dir, &["create", disk, "--size", "16M"]);
    }
    let served = serve(dir, &["a.vhd", "--nbd", "unix:n", "--vhost-user", "v", "--on-error", "pause"]);
    Client::connect(&nbd(dir, "")).unwrap().write(0, &[1; 65536], true).unwrap();
    assert_prints(dir, "ls", &["c"]);
    assert_prints(dir, "show", &["c"]);
    assert_prints(dir, "stat", &["c", "--interval", "50ms"]);
    assert_prints(dir, "slow", &["c"]);
    assert_prints(dir, "limit", &["c", "--iops", "100000"]);
    assert_eq!(assert_prints(dir, "resize", &["c", "20M"])["virtual_size_bytes"], 20 << 20);
    assert_eq!(assert_prints(dir, "resize", &["b.raw", "12M", "--shrink"])["virtual_size_bytes"], 12 << 20);
    assert_eq!(assert_prints(dir, "on-error", &["c", "pause", "--pause-at-most", "9s"])["pause_at_most_s"], 9.0);
    assert_prints(dir, "accept-loss", &["c"]);
    let paused = assert_prints(dir, "pause", &["c"]);
    let goes_on = assert_prints(dir, "resume", &["c", "--pause", paused["id"].as_str().unwrap()]);
    assert_eq!((&paused["disk"], &goes_on["disk"]), (&"a".into(), &"a".into()));
    assert_prints(dir, "trace", &["c", "--for", "10ms"]);
    ok(dir, &["create", "c.raw", "--size", "1M"]);
    ok(dir, &["attach", "c", "c.raw"]);
    assert_eq!(assert_prints_any(dir, "detach", &["c", "--name", "c"])["disks"][0]["name"], "a");
    let document = schema(dir, "api");
    let told = ask(&dir.join("c"), "GET", "/v1/openapi.json", "").1;
    assert_eq!(told["info"], document["info"]);
    let disk = format!("{{\"disk\":\"{}\"}}", dir.join("b.raw").display());
    let export = format!("{{\"protocol\":\"nbd\",\"address\":\"unix:{}\"}}", dir.join("m").display());
    let address = format!("/v1/exports/unix:{}", dir.join("m").display().to_string().replace('/', "%2F"));
    let calls = [
        ("GET", "/v1/disks", "/v1/disks", "", 200),
        ("GET", "/v1/disks/{name}", "/v1/disks/a", "", 200),
        ("GET", "/v1/disks/{name}", "/v1/disks/nobody", "", 404),
        ("GET", "/v1/disks/{name}/info", "/v1/disks/a/info", "", 200),
        ("GET", "/v1/disks/{name}/map", "/v1/disks/a/map", "", 200),
        ("GET", "/v1/disks/{name}/map", "/v1/disks/a/map?max_runs=x", "", 400),
        ("GET", "/v1/disks/{name}/stats", "/v1/disks/a/stats", "", 200),
        ("GET", "/v1/disks/{name}/slow", "/v1/disks/a/slow", "", 200),
        ("POST", "/v1/disks/{name}/trace", "/v1/disks/a/trace?for_ms=1000000", "", 400),
        ("GET", "/v1/workers", "/v1/workers", "", 200),
        ("GET", "/v1/stats", "/v1/stats", "", 200),
        ("POST", "/v1/disks", "/v1/disks", &disk, 201),
        ("PATCH", "/v1/disks/{name}", "/v1/disks/b", "{\"virtual_size_bytes\":33554432,\"on_error\":\"pause\"}", 200),
        // The name of the size in older builds.
        ("PATCH", "/v1/disks/{name}", "/v1/disks/b", "{\"size_bytes\":67108864}", 200),
        ("PATCH", "/v1/disks/{name}", "/v1/disks/b", "{\"pause_at_most_s\":9.5}", 200),
        ("POST", "/v1/disks/{name}/resume", "/v1/disks/a/resume", "", 200),
        ("POST", "/v1/disks/{name}/resume", "/v1/disks/a/resume", "{\"pause\":\"1f0c2a9b7e35\"}", 408),
        ("POST", "/v1/disks/{name}/accept-loss", "/v1/disks/a/accept-loss", "", 200),
        ("DELETE", "/v1/disks/{name}", "/v1/disks/b", "", 200),
        ("POST", "/v1/exports", "/v1/exports", &export, 201),
        ("DELETE", "/v1/exports/{address}", &address, "", 200),
        ("PUT", "/v1/log-level", "/v1/log-level", "{\"level\":\"info\"}", 200),
    ];
    for (method, path, at, body, status) in calls {
        let (found, answer) = ask(&dir.join("c"), method, at, body);
        assert_eq!(found, status, "{method} {at}: {answer}");
        let kind = if status < 300 { status.to_string() } else { "default".to_owned() };
        assert_fits_answer(&schema_at(&document, path, method, &["responses", &kind]), &answer, at);
        if !body.is_empty() && !body.contains("\"size_bytes\"") {
            let asked = schema_at(&document, path, method, &["requestBody"]);
            assert_eq!(mistakes(&asked, &serde_json::from_str(body).unwrap()), [""; 0], "{method} {at}");
        }
    }
    assert!(served.terminate().success());
}

/// As [`assert_fits`]; an answer may have no key that must be there.
fn assert_fits_answer(schema: &Value, answer: &Value, what: &str) {
    let wrong = mistakes(schema, answer);
    assert!(wrong.is_empty(), "{what}: {wrong:?}\n{answer:#}");
    let mut more = answer.clone();
    more["more"] = 1.into();
    assert!(!mistakes(schema, &more).is_empty(), "{what}: any key is taken");
}

#[test]
fn loads_and_experiments_print_what_their_schemas_say() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    ok(dir, &["create", "a.raw", "--size", "16M"]);
    let served = serve(dir, &["a.raw", "--nbd", "unix:n"]);
    let uri = "nbd+unix:///?socket=n";
    assert_prints(dir, "load", &[uri, "--rw", "randrw", "--ios", "200", "--verify", "--save-model", "m"]);
    assert_prints(dir, "load", &[uri, "--verify-model", "m"]);
    assert!(served.terminate().success());
    assert_prints(dir, "demo", &["--seconds", "1", "--span", "16M", "--size", "64M"]);
    let short = ["--quick", "--rounds", "1"];
    assert_prints(dir, "bench paths", &[&short[..], &["--sizes", "4k"]].concat());
    assert_prints(dir, "bench exchange", &short);
    assert_prints(dir, "bench crowd", &[&short[..], &["--disks", "2"]].concat());
    let aggregate = ["--quick", "--seconds", "20ms", "--guests", "1", "--disks", "1", "--sizes", "64k"];
    assert_prints(dir, "bench aggregate", &aggregate);
    assert_prints(dir, "bench hung", &short);
    assert_prints(dir, "bench limit", &short);
    assert_prints(dir, "bench checkpoint", &short);
    assert_prints(dir, "bench promises", &[&short[..], &["--only", "sparse", "--folder", "."]].concat());
    let set = ["--only", "depth", "--only", "density", "--only", "layers", "--only", "geometry", "--only", "warmup"];
    assert_prints(dir, "bench all", &[&["--quick", "--folder", ".", "--out", "o"][..], &set].concat());
    assert_prints(
        dir,
        "bench depth",
        &["--quick", "--depths", "1", "--seconds", "50ms", "--size", "1M", "--folder", "."],
    );
    assert_prints(dir, "bench density", &["--quick", "--disks", "2", "--each", "1", "--seconds", "200ms"]);
    assert_prints(
        dir,
        "bench layers",
        &["--quick", "--size", "1M", "--sizes", "64k", "--place", "file", "--folder", "."],
    );
    assert_prints(dir, "bench geometry", &["a.raw", "--quick", "--length", "1M"]);
    assert_prints(dir, "bench warmup", &["--quick", "--size", "2M", "--folder", "."]);
}

#[test]
fn all_schemas_are_told_at_once_and_unknown_ones_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let all: Value = serde_json::from_str(&ok(dir, &["schema"])).unwrap();
    assert_eq!(all["info"], serde_json::from_str::<Value>(&ok(dir, &["schema", "info"])).unwrap());
    assert!(all["api"]["paths"]["/v1/disks"].is_object());
    assert!(fails(dir, 2, &["schema", "serve"]).contains("there are create, info, map"));
    assert_eq!(json(dir, &["measure", "--size", "1M", "--to", "raw"])["file_bytes"], 1 << 20);
}
