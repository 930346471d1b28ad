const ALLOWED: &[Exception] = &[];
