-- wrk -t 4 -c 128 -d 20s --timeout 20s -s benchmark.lua http://127.0.0.1:5005/stream
wrk.method = "POST"
wrk.body = "s=Happy+birthday+to+[MASK]."
wrk.headers["Content-Type"] = "application/x-www-form-urlencoded"
